// The frame: runs on the left, views on top, one view below; keys; light and dark.

import { get, listen, onNotice } from "./api.js";
import { ago, debounce, fill, h, number } from "./dom.js";
import { go, link, onChange, open, read } from "./state.js";
import { PALETTE } from "./charts.js";
import * as about from "./about.js";
import * as curves from "./curves.js";
import * as data from "./data.js";
import * as episode from "./episode.js";
import * as experts from "./experts.js";
import * as group from "./group.js";
import * as live from "./live.js";
import * as rollouts from "./rollouts.js";
import * as step from "./step.js";
import * as task from "./task.js";
import * as time from "./time.js";

const VIEWS = { curves, rollouts, step, group, episode, task, live, time, experts, data, about };
const TABS = [["curves", "Curves"], ["step", "Steps"], ["rollouts", "Rollouts"], ["live", "Live"], ["time", "Time"], ["experts", "Experts"], ["data", "SFT data"], ["about", "Run"]];
const KEYS = [
  ["j / k", "next, previous row, turn or episode"], ["n / p", "next, previous step or match"], ["Enter", "open what is selected"],
  ["Esc, u", "one level up"], ["/", "search"], ["c", "next token colour"], ["1 … 8", "the views from left to right"],
  ["d", "light, dark, as the system"], ["?", "these keys"],
];

const app = document.getElementById("app");
const sidebar = h("nav", { class: "sidebar", "aria-label": "runs" });
const tabs = h("nav", { class: "tabs", "aria-label": "views" });
const crumbs = h("div", { class: "crumbs" });
const body = h("main", { class: "view", tabindex: "-1" });
const help = h("dialog", { class: "help" }, h("h2", null, "Keys"), h("table", null, KEYS.map(([key, meaning]) => h("tr", null, h("td", null, h("kbd", null, key)), h("td", null, meaning)))),
  h("p", { class: "muted" }, "The address holds the whole view: copy it to show somebody the same."), h("button", { onclick: () => help.close() }, "Close"));
const connection = h("span", { class: "connection", title: "whether this page hears what happens" }, "…");
let runs = [];
let shown = null; // {name, key, view}

fill(app, sidebar, h("div", { class: "content" }, h("header", { class: "top" }, tabs, h("span", { class: "grow" }), connection,
  h("button", { class: "quiet", title: "keys (?)", onclick: () => help.showModal() }, "?"),
  h("button", { class: "quiet", title: "light or dark (d)", onclick: theme }, "◐")), crumbs, body), help);

function theme() {
  const next = { undefined: "dark", dark: "light", light: undefined }[document.documentElement.dataset.theme];
  setTheme(next);
  try { next ? localStorage.setItem("theme", next) : localStorage.removeItem("theme"); } catch { /* a private window */ }
  redraw(true);
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}
try { setTheme(localStorage.getItem("theme") || undefined); } catch { /* a private window */ }

async function loadRuns() {
  const answer = await get("runs");
  runs = answer.runs;
  drawSidebar(answer.root);
  const state = read();
  if (!state.run && runs.length) go({ run: runs[0].id, view: state.view || "curves" }, { replace: true });
  else if (!runs.length) fill(body, h("p", { class: "empty" }, "No run is here yet. A run appears as soon as its run.json does."));
}

export function others(state = read()) {
  return (state.with || "").split("|").filter((name) => name && name !== state.run && runs.some((run) => run.id === name));
}

function drawSidebar(root) {
  const state = read();
  const chosen = [state.run, ...others(state)];
  fill(sidebar, h("div", { class: "brand" }, h("img", { src: "/static/icon.svg", alt: "", width: 18, height: 18 }), "k3rl"),
    h("div", { class: "muted root", title: root }, `${runs.length} run${runs.length === 1 ? "" : "s"}`),
    runs.map((run) => {
      const place = chosen.indexOf(run.id);
      const mark = h("input", { type: "checkbox", checked: place >= 0, title: "draw its curves beside those of the open run", onchange: () => toggle(run.id) });
      const swatch = h("i", { class: "swatch" });
      if (place >= 0) swatch.style.background = PALETTE[place % PALETTE.length];
      const last = run.last ? `${run.last.stage} ${run.last.step + 1}` : "–";
      return h("div", { class: `run${run.id === state.run ? " current" : ""}` }, mark, h("a", { href: link(state.view && VIEWS[state.view] && TABS.some(([name]) => name === state.view) ? state.view : "curves", { run: run.id }), title: run.error || run.id },
        h("span", { class: "name" }, swatch, run.name), h("span", { class: "facts" }, h("span", { class: `status ${run.status}` }, run.status), " ", run.status === "unreadable" ? "" : `${last} · ${number(run.episodes)} ep · ${ago(run.last?.t || run.started)}`)));
    }));
}

function toggle(id) {
  const state = read();
  const kept = new Set(others(state));
  if (id === state.run) return drawSidebar("");
  kept.has(id) ? kept.delete(id) : kept.add(id);
  go({ with: [...kept].join("|") || null });
}

function drawTabs(state) {
  fill(tabs, TABS.map(([name, label]) => h("a", { href: link(name), class: name === state.view ? "current" : "" }, label)));
  const parts = [];
  const add = (label, view, changes) => parts.push(h("span", { class: "sep" }, "›"), h("a", { href: link(view, changes) }, label));
  if (state.run) parts.push(h("a", { href: link("curves") }, runs.find((run) => run.id === state.run)?.name || state.run));
  if (state.stage && state.step !== undefined) add(`${state.stage} step ${Number(state.step) + 1}`, "step", { stage: state.stage, step: state.step });
  if (state.group) add(`group ${state.group}`, "group", { stage: state.stage, step: state.step, group: state.group });
  if (state.episode) add(`episode ${state.episode}`, "episode", { stage: state.stage, step: state.step, group: state.group, episode: state.episode, attempt: state.attempt });
  if (state.task && state.view === "task") add(`task ${state.task}`, "task", { task: state.task });
  fill(crumbs, parts);
}

function redraw(anew = false) {
  const state = read();
  drawTabs(state);
  drawSidebar("");
  const view = VIEWS[state.view] ? state.view : "curves";
  if (!state.run) return;
  document.title = `${state.episode || state.group || view} · ${runs.find((run) => run.id === state.run)?.name || state.run} · k3rl`;
  const key = [view, state.run, state.with || "", ...VIEWS[view].KEY.map((name) => state[name])].join("\u0000");
  if (!anew && shown && shown.key === key) return shown.view.update?.(state);
  shown?.view.destroy?.();
  fill(body);
  body.scrollTop = 0;
  const box = h("div", { class: `page ${view}` });
  body.append(box);
  const context = { runs: [state.run, ...others(state)], about: (id) => runs.find((run) => run.id === id), fail: (error) => failed(box, error) };
  shown = { key, view: VIEWS[view].mount(box, state, context) || {} };
}

function failed(box, error) {
  if (error.name === "AbortError") return;
  fill(box, h("p", { class: "error" }, error.message));
}

document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement && event.target.type !== "checkbox" || event.target instanceof HTMLSelectElement;
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const state = read();
  if (shown?.view.key?.(event.key)) return event.preventDefault();
  if (event.key === "?") help.showModal();
  else if (event.key === "d") theme();
  else if (event.key >= "1" && event.key <= String(TABS.length)) open(TABS[Number(event.key) - 1][0]);
  else if (event.key === "Escape" || event.key === "u") up(state);
  else if (event.key === "/") {
    const field = body.querySelector("input[type=search]");
    if (!field) return;
    field.focus();
  } else return;
  event.preventDefault();
});

function up(state) {
  if (help.open) return;
  const { stage, step: of, group: name } = state;
  if (state.view === "episode") open(name ? "group" : "rollouts", { stage, step: of, group: name });
  else if (state.view === "group") open("step", { stage, step: of });
  else open("curves");
}

const refresh = debounce(() => loadRuns().catch(() => {}), 250);
onChange(() => redraw());
onNotice((changed) => {
  refresh();
  const state = read();
  const relevant = changed === null || changed.some((id) => id === state.run || others(state).includes(id));
  if (relevant) shown?.view.changed?.();
});
listen((status) => {
  connection.textContent = status ? "● live" : "○ offline";
  connection.classList.toggle("off", !status);
});
setInterval(refresh, 5000); // a run that crashed writes nothing
loadRuns().then(() => redraw()).catch((error) => failed(body, error));
