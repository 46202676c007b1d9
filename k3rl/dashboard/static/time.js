// Where each second of a step went.

import { fileAddress, get } from "./api.js";
import { PALETTE, chart, numbers } from "./charts.js";
import { choice, debounce, fill, h, number, seconds } from "./dom.js";
import { go, open } from "./state.js";

export const KEY = [];
const NAMES = { wait_for_batch: "waiting for rollouts", wait_for_policy: "learner", teacher: "teacher", publish: "publishing weights", wait_for_evaluation: "waiting for an evaluation", other: "everything else" };

export function mount(box, state, context) {
  let charts = [];
  let current = state;
  async function load() {
    const stages = await get("times", { run: state.run });
    const names = Object.keys(stages);
    const stage = names.includes(current.stage) ? current.stage : names.includes("rl") ? "rl" : names.at(-1);
    charts.forEach((own) => own.destroy());
    charts = [];
    const perfetto = h("a", { href: fileAddress("perfetto", { run: state.run }), title: "a Trace Event file; open it at ui.perfetto.dev or chrome://tracing" }, "save for Perfetto");
    if (!stage) return fill(box, perfetto, h("p", { class: "empty" }, "No step has ended yet."));
    const { steps, parts, nested } = stages[stage];
    const lines = Object.entries(parts).map(([name, values], index) => ({ label: NAMES[name] || name, steps, values: numbers(values), colour: PALETTE[index] }));
    charts.push(chart({ title: `seconds of a ${stage} step`, note: "stacked, in the driver's loop", lines, stacked: true, height: 300, onPick: (step) => open("step", { stage, step }) }));
    const inner = Object.entries(nested).filter(([, values]) => values.some((value) => value !== null));
    if (inner.length) charts.push(chart({ title: "inside other processes", note: "these overlap with the above", lines: inner.map(([name, values], index) => ({ label: name, steps, values: numbers(values), colour: PALETTE[index + 5] })), height: 140 }));
    const total = lines.reduce((sum, line) => sum + line.values.reduce((a, b) => a + (b || 0), 0), 0);
    fill(box, h("div", { class: "bar" }, h("h1", null, "Where the time went"), choice("stage", stage, names.map((name) => [name, name]), (value) => go({ stage: value, step: null })), perfetto),
      charts.map((own) => own.element),
      h("table", null, h("tr", null, ["part", "seconds in all", "share", "a step, mean"].map((name) => h("th", null, name))), lines.map((line) => {
        const own = line.values.reduce((a, b) => a + (b || 0), 0);
        const swatch = h("i", { class: "swatch" });
        swatch.style.background = line.colour;
        return h("tr", null, h("td", null, swatch, line.label), h("td", null, seconds(own)), h("td", null, total ? `${number((own / total) * 100, 3)} %` : "–"), h("td", null, seconds(own / steps.length)));
      })));
  }
  load().catch(context.fail);
  return { update(next) { current = next; load().catch(context.fail); }, changed: debounce(() => load().catch(() => {}), 300), destroy() { charts.forEach((own) => own.destroy()); } };
}
