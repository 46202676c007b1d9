// One task over policy versions: every episode of it, and what two of them wrote, word by word.

import { get } from "./api.js";
import { PALETTE, chart } from "./charts.js";
import { fill, h, number } from "./dom.js";
import { advantage, episodeLink, reward } from "./rows.js";
import { go } from "./state.js";

export const KEY = ["task"];

export function mount(box, state, context) {
  let rows = [];
  let current = state;
  let plot = null;
  const diff = h("div", { class: "diff" });
  async function load() {
    ({ rows } = await get("task", { run: state.run, task: state.task }));
    if (!rows.length) return fill(box, h("p", { class: "empty" }, "No episode of this task is recorded."));
    if (!current.a || !current.b) {
      const first = current.a || rows[0].id;
      const last = rows.findLast((row) => row.id !== first)?.id;
      return go({ a: first, b: current.b || last || null }, { replace: true });
    }
    draw();
  }
  function draw() {
    plot?.destroy();
    const scored = rows.filter((row) => row.reward !== null);
    const steps = [...new Set(scored.map((row) => row.step))].sort((a, b) => a - b);
    const mean = steps.map((step) => { const own = scored.filter((row) => row.step === step).map((row) => row.reward); return own.reduce((a, b) => a + b, 0) / own.length; });
    plot = steps.length > 1 ? chart({ title: "mean reward of the task by step", lines: [{ label: "reward", steps, values: mean, colour: PALETTE[0] }], sync: "task", height: 110 }) : null;
    const pick = (row, side) => h("input", { type: "radio", name: side, checked: current[side] === row.id, "aria-label": `${row.id} as ${side}`, onchange: () => go({ [side]: row.id }, { replace: true }) });
    fill(box, h("h1", null, `Task ${state.task}`), plot?.element,
      h("table", { class: "history" }, h("tr", null, ["from", "to", "episode", "step", "reward", "advantage", "tokens", "ended by"].map((name) => h("th", null, name))), rows.map((row) => h("tr", null, h("td", null, pick(row, "a")), h("td", null, pick(row, "b")), h("td", null, h("a", { class: "mono", href: episodeLink(row) }, row.id)), h("td", null, `${row.stage} ${row.step + 1}`), h("td", null, reward(row)), h("td", null, advantage(row.advantage)), h("td", null, number(row.sampled_tokens)), h("td", null, row.stop_reason)))), diff);
    compare().catch(context.fail);
  }
  async function compare() {
    if (!current.a || !current.b) return fill(diff, h("p", { class: "muted" }, "The task was played once: there is nothing to compare it with."));
    const { parts, cut } = await get("diff", { run: state.run, a: current.a, b: current.b });
    const same = parts.every(([kind]) => kind === "=");
    fill(diff, h("h2", null, `From ${current.a} to ${current.b}`), h("p", { class: "muted" }, same ? "They wrote the same. " : "", h("del", null, "only the first wrote this"), " ", h("ins", null, "only the second wrote this"), cut ? ` ${number(cut)} more words are not compared.` : ""),
      h("pre", null, parts.map(([kind, text]) => (kind === "=" ? text : h(kind === "-" ? "del" : "ins", null, text)))));
  }
  load().catch(context.fail);
  return {
    update(next) {
      current = next;
      if (rows.length) draw();
    },
    destroy() { plot?.destroy(); },
  };
}
