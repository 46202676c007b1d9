// The episodes of a run: filters, a histogram of rewards that selects, search in what was written, a long list.

import { get } from "./api.js";
import { ago, choice, debounce, fill, h, number } from "./dom.js";
import { advantage, episodeLink, reward } from "./rows.js";
import { go } from "./state.js";
import { VirtualList } from "./virtual.js";

export const KEY = [];
const FILTERS = ["stage", "step", "group", "task", "env", "family", "status", "stop_reason", "level", "reward_min", "reward_max", "text"];
const SORTS = [["t", "time"], ["reward", "reward"], ["advantage", "advantage"], ["sampled_tokens", "tokens"], ["turns", "turns"], ["step", "step"], ["level", "level"]];
const COLUMNS = [["episode", "id"], ["step", "step"], ["task", "task"], ["reward", "reward"], ["advantage", "adv."], ["turns", "turns"], ["tokens", "tokens"], ["stop", "ended by"], ["when", "when"]];

export function mount(box, state, context) {
  const bar = h("div", { class: "bar" });
  const chips = h("div", { class: "chips" });
  const histogram = h("div", { class: "histogram" });
  const found = h("div", { class: "found" });
  const fresh = h("button", { class: "fresh", hidden: true, onclick: () => { list.element.scrollTop = 0; reload(); } });
  const total = h("span", { class: "muted" });
  const list = new VirtualList({
    rowHeight: 26,
    load: (offset, limit) => get("episodes", { run: state.run, ...filters(current), sort: current.sort, order: current.order, offset, limit }),
    draw,
    onTotal: (answer) => drawAround(answer),
  });
  const head = h("div", { class: "row head" }, COLUMNS.map(([, label]) => h("span", null, label)));
  fill(box, bar, chips, histogram, found, h("div", { class: "listbar" }, total, fresh), h("div", { class: "list" }, head, list.element));
  let current = state;
  let known = 0;
  let searching = 0;

  function filters(of) {
    return Object.fromEntries(FILTERS.map((name) => [name, of[name]]));
  }

  function draw(row) {
    return h("a", { href: episodeLink(row), role: "option" }, h("span", { class: "mono" }, row.id), h("span", null, `${row.stage} ${row.step + 1}`), h("span", { title: row.task }, row.task),
      h("span", null, reward(row)), h("span", null, advantage(row.advantage)), h("span", null, String(row.turns)), h("span", null, number(row.sampled_tokens)), h("span", { class: `stop ${row.stop_reason}` }, row.stop_reason), h("span", { class: "muted" }, ago(row.t)));
  }

  function drawAround(answer) {
    known = answer.recorded;
    fresh.hidden = true;
    total.textContent = `${number(answer.total)} of ${number(answer.recorded)} episodes`;
    const any = (label, counts) => [["", `any ${label}`], ...Object.entries(counts).map(([name, count]) => [name, `${name} (${count})`])];
    const pick = (name) => (value) => go({ [name]: value || null });
    if (document.activeElement?.closest(".bar") !== bar || !bar.children.length) {
      fill(bar, h("input", { type: "search", placeholder: "text in prompts and answers", "aria-label": "search in prompts and answers", value: current.q || "", onchange: (event) => go({ q: event.target.value || null }) }),
        ["stage", "status", "family", "stop_reason", "env"].map((name) => Object.keys(answer.facets[name]).length > 1 || current[name] ? choice(name.replace("_", " "), current[name], any("", answer.facets[name]), pick(name)) : null),
        choice("sort", current.sort || "t", SORTS, (value) => go({ sort: value === "t" ? null : value })),
        choice("order", current.order || "", [["", "down"], ["asc", "up"]], pick("order")),
        h("input", { type: "text", placeholder: "id, task, family", "aria-label": "id, task or family", value: current.text || "", oninput: debounce((event) => go({ text: event.target.value || null }, { replace: true }), 200) }));
    }
    fill(chips, FILTERS.filter((name) => current[name] !== undefined && !["stage", "status", "family", "stop_reason", "env", "text"].includes(name)).map((name) => h("button", { class: "chip", title: "take this filter away", onclick: () => go({ [name]: null }) }, `${name.replace("_", " ")} ${name === "step" ? Number(current.step) + 1 : current[name]} ×`)));
    drawHistogram(answer.histogram);
  }

  function drawHistogram({ edges, counts }) {
    const most = Math.max(1, ...counts);
    const low = current.reward_min === undefined ? -Infinity : Number(current.reward_min);
    const high = current.reward_max === undefined ? Infinity : Number(current.reward_max);
    fill(histogram, counts.map((count, index) => {
      const from = edges[index];
      const to = edges[index + 1];
      const chosen = from >= low && to <= high;
      const bin = h("button", { class: `bin${chosen ? "" : " out"}`, title: `reward ${number(from, 3)} to ${number(to, 3)}: ${count} episodes`, "aria-label": `reward ${number(from, 3)} to ${number(to, 3)}, ${count} episodes`, onclick: () => chosen && current.reward_min !== undefined ? go({ reward_min: null, reward_max: null }) : go({ reward_min: from, reward_max: to }) }, h("i", null));
      bin.firstChild.style.height = `${count ? Math.max(4, (count / most) * 100) : 0}%`;
      return bin;
    }), counts.length ? h("span", { class: "ends" }, h("span", null, number(edges[0], 3)), h("span", null, "reward"), h("span", null, number(edges.at(-1), 3))) : null);
  }

  async function search() {
    const mine = ++searching;
    if (!current.q) return fill(found);
    const rows = [];
    let after = 0;
    do {
      const answer = await get("search", { run: state.run, ...filters({ ...current, text: undefined }), q: current.q, after });
      if (mine !== searching) return;
      rows.push(...answer.rows);
      after = answer.next;
      const more = after !== null && rows.length < 200;
      fill(found, h("p", { class: "muted" }, `${rows.length} episodes with “${current.q}”; ${number(answer.searched)} of ${number(answer.of)} searched${more ? " …" : ""}`),
        rows.map((row) => h("a", { class: "hit", href: episodeLink(row, { find: current.q, turn: row.turn, branch: row.branch }) }, h("span", { class: "mono" }, row.id), reward(row), h("span", { class: "excerpt" }, row.excerpt[0], h("mark", null, row.excerpt[1]), row.excerpt[2]))));
    } while (after !== null && rows.length < 200);
  }

  const reload = () => list.reload().catch(context.fail);
  reload();
  search().catch(context.fail);
  return {
    update(next) {
      const asked = next.q !== current.q || FILTERS.some((name) => next[name] !== current[name]);
      current = next;
      list.element.scrollTop = 0;
      reload();
      if (asked) search().catch(context.fail);
    },
    changed: debounce(async () => {
      if (list.atTop) return reload();
      const { recorded } = await get("episodes", { run: state.run, limit: 1 });
      fresh.textContent = `${recorded - known} more`;
      fresh.hidden = recorded === known;
    }, 100),
    key(name) {
      if (name === "j" || name === "k") return list.move(name === "j" ? 1 : -1), true;
      const row = list.row(list.selected);
      if (name === "Enter" && row) return (location.hash = episodeLink(row)), true;
      return false;
    },
    destroy() { searching++; list.destroy(); },
  };
}
