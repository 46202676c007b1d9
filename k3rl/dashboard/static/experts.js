// The load of experts: one picture a layer, a column a step, a row an expert.

import { get } from "./api.js";
import { choice, fill, h, number } from "./dom.js";
import { go, open } from "./state.js";

export const KEY = [];
// Lightness falls steadily, so the scale reads without its hues too.
const RAMP = ["#fff7dc", "#fddf9c", "#f7b85e", "#e58a36", "#bf5a1f", "#86340f", "#4a1a05"];

export function mount(box, state, context) {
  let current = state;
  const readout = h("p", { class: "muted readout" }, "Point at a cell.");
  async function load() {
    const { stages } = await get("metrics", { run: state.run });
    const names = Object.keys(stages);
    const loads = await Promise.all(names.map((stage) => get("experts", { run: state.run, stage })));
    const recorded = names.filter((_, index) => loads[index].steps.length);
    const stage = recorded.includes(current.stage) ? current.stage : recorded.includes("rl") ? "rl" : recorded[0];
    if (!stage) return fill(box, h("h1", null, "Load of experts"), h("p", { class: "empty" }, "No loads are recorded: the learner's record of steps (traces/annotations/steps.jsonl) has none."));
    const { steps, load } = loads[names.indexOf(stage)];
    const experts = load[0][0].length;
    const balanced = 1 / experts;
    const most = Math.max(...load.flat(2)) / balanced;
    const top = Math.max(2, Math.ceil(most));
    fill(box, h("div", { class: "bar" }, h("h1", null, "Load of experts"), choice("stage", stage, recorded.map((name) => [name, name]), (value) => go({ stage: value })), scale(top)),
      h("p", { class: "muted" }, `Share of a layer's tokens that an expert got, as a multiple of an even share (1 of ${experts}); steps from left to right, a click opens the step. The busiest had ${number(most, 3)} times its share.`), readout,
      h("div", { class: "heatmaps" }, load[0].map((_, layer) => map(layer, steps, load, balanced, top, stage))));
  }
  function shade(value, top) {
    return RAMP[Math.min(RAMP.length - 1, Math.floor((value / top) * RAMP.length))];
  }
  function map(layer, steps, load, balanced, top, stage) {
    const experts = load[0][layer].length;
    const width = Math.max(4, Math.min(16, Math.floor(560 / steps.length)));
    const height = Math.max(2, Math.min(12, Math.floor(220 / experts)));
    const canvas = h("canvas", { width: steps.length * width, height: experts * height, role: "img", "aria-label": `layer ${layer + 1}: load of ${experts} experts over ${steps.length} steps` });
    const paint = canvas.getContext("2d");
    load.forEach((layers, step) => layers[layer].forEach((share, expert) => {
      paint.fillStyle = shade(share / balanced, top);
      paint.fillRect(step * width, expert * height, width, height);
    }));
    const at = (event) => {
      const area = canvas.getBoundingClientRect();
      return [Math.min(steps.length - 1, Math.max(0, Math.floor(((event.clientX - area.left) / area.width) * steps.length))), Math.min(experts - 1, Math.max(0, Math.floor(((event.clientY - area.top) / area.height) * experts)))];
    };
    canvas.addEventListener("mousemove", (event) => {
      const [step, expert] = at(event);
      readout.textContent = `MoE layer ${layer + 1}, expert ${expert}, step ${steps[step] + 1}: ${number(load[step][layer][expert] / balanced, 3)} times an even share`;
    });
    canvas.addEventListener("click", (event) => open("step", { stage, step: steps[at(event)[0]] }));
    return h("figure", null, h("figcaption", null, `MoE layer ${layer + 1}`), canvas);
  }
  function scale(top) {
    return h("span", { class: "legend" }, RAMP.map((colour, index) => {
      const key = h("span", { class: "key" }, number((index / RAMP.length) * top, 2));
      key.style.background = colour;
      key.style.color = index > 3 ? "#fff" : "#222";
      return key;
    }), h("span", { class: "muted" }, "times an even share, from"));
  }
  load().catch(context.fail);
  return { update(next) { current = next; load().catch(context.fail); } };
}
