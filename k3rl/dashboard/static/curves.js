// Curves: a first screen of what matters, then every metric by name. Runs that are ticked are drawn over each other.

import { get } from "./api.js";
import { PALETTE, chart, numbers, smoothed } from "./charts.js";
import { choice, debounce, fill, h } from "./dom.js";
import { go, open } from "./state.js";

export const KEY = [];

const PANELS = [
  ["Reward", /^reward\/[^/]+\/mean$/], ["Held-out reward", /^eval\/[^/]+\/(mean|pass_rate)$/],
  ["Reward parts", /^reward\/[^/]+\/parts\/.+\/mean$/], ["Loss", /^(loss\/mean|val\/loss|distill\/kl_reverse)$/],
  ["Response length", /^response_length\/mean$/], ["Cut by length", /^response_length\/clip_ratio$/],
  ["Flat groups", /^group\/frac_zero_std$/], ["Advantage", /^advantage\/(std|min|max)$/],
  ["Entropy", /^policy\/entropy\/mean$/], ["Sampler–learner KL", /^(mismatch\/kl\/mean|mismatch\/canary)$/],
  ["Ratio", /^ratio\/(mean|max)$/], ["Clipped", /^policy\/clip_frac_(low|high)$/],
  ["Gradient norm", /^optim\/grad_norm$/], ["Staleness", /^staleness\/(mean|max)$/],
  ["Trained tokens/s", /^perf\/goodput$/], ["Step seconds", /^time\/(step|wait_for_batch|wait_for_policy|publish)$/],
  ["Prefix cache hits", /^derived\/cache_hits$/], ["Expert imbalance", /^moe\/max_vio\/(mean|max)$/],
  ["Environment", /^env\/[^/]+\/(failed|invalid|parse_error|num_turns)$/], ["Environment's own", /^env\/[^/]+\/metrics\//],
];

export function mount(box, state, context) {
  const bar = h("div", { class: "bar" });
  const panels = h("div", { class: "panels" });
  fill(box, bar, panels);
  let charts = [];
  let answers = [];
  let alive = true;
  const versions = new Map();

  async function load() {
    const found = await Promise.all(context.runs.map((run) => get("metrics", { run })));
    if (!alive) return;
    const fresh = found.some((answer, index) => versions.get(context.runs[index]) !== answer.version);
    found.forEach((answer, index) => versions.set(context.runs[index], answer.version));
    answers = found.map((answer) => answer.stages);
    if (fresh) draw(current);
  }
  let current = state;

  function draw(state) {
    current = state;
    const stages = [...new Set(answers.flatMap((stages) => Object.keys(stages)))];
    const stage = stages.includes(state.stage) ? state.stage : stages.includes("rl") ? "rl" : stages.at(-1);
    const weight = Number(state.smooth || 0);
    const search = bar.querySelector("input[type=search]");
    if (!search || bar.dataset.stages !== stages.join()) {
      bar.dataset.stages = stages.join();
      fill(bar, choice("stage", stage, stages.map((name) => [name, name]), (value) => go({ stage: value, step: null })),
        choice("smooth", state.smooth || "", [["", "none"], ["0.5", "0.5"], ["0.8", "0.8"], ["0.95", "0.95"]], (value) => go({ smooth: value || null })),
        h("input", { type: "search", placeholder: "metric names, all of them with *", value: state.metric || "", "aria-label": "metric names", oninput: debounce((event) => go({ metric: event.target.value || null }, { replace: true }), 200) }),
        h("span", { class: "muted" }, "A click on a curve opens the step."));
    }
    for (const own of charts) own.destroy();
    charts = [];
    fill(panels);
    if (!stage) return fill(panels, h("p", { class: "empty" }, "No metrics yet: the first line is written when the first step ends."));
    const lines = gather(stage, weight);
    const names = [...lines.keys()];
    const wanted = state.metric
      ? names.filter((name) => state.metric === "*" || name.includes(state.metric)).slice(0, 120).map((name) => [name, [name]])
      : PANELS.map(([title, pattern]) => [title, names.filter((name) => pattern.test(name)).slice(0, 8)]);
    for (const [title, own] of wanted) {
      if (!own.length) continue;
      const many = own.length > 1;
      const all = own.flatMap((name, index) => lines.get(name).map((line) => ({ ...line, label: label(line, name, many), colour: PALETTE[(many ? index : line.place) % PALETTE.length], dash: many && line.place > 0 })));
      const one = chart({ title, lines: all, note: `${many ? "" : own[0]}${thinned(stage)}`, onPick: (step, line) => open("step", { run: line.run, stage, step }) });
      charts.push(one);
      panels.append(one.element);
    }
    if (!charts.length) fill(panels, h("p", { class: "empty" }, "No metric has such a name."));
  }

  /** Says where not every step is drawn. */
  function thinned(stage) {
    const most = Math.max(...answers.map((stages) => stages[stage]?.every || 1));
    return most > 1 ? ` one step in ${most}` : "";
  }

  function label(line, name, many) {
    const run = context.runs.length > 1 ? `${context.about(line.run)?.name || line.run} ` : "";
    const parts = name.split("/");
    const short = parts[0] === "reward" && parts[2] === "parts" ? parts[3] : parts[2] === "metrics" ? parts.slice(3).join("/") : parts.slice(parts[0] === "env" ? 2 : 1).join("/");
    return many ? run + short : run + name;
  }

  /** name -> a line for each run that has it. */
  function gather(stage, weight) {
    const lines = new Map();
    answers.forEach((stages, place) => {
      const columns = stages[stage];
      if (!columns) return;
      const values = { ...columns.values, ...derived(columns) };
      for (const [name, column] of Object.entries(values)) {
        if (!lines.has(name)) lines.set(name, []);
        lines.get(name).push({ run: context.runs[place], place, steps: columns.steps, values: smoothed(numbers(column), weight) });
      }
    });
    return lines;
  }

  load().catch(context.fail);
  return {
    update: draw,
    changed: debounce(() => load().catch(() => {}), 150),
    destroy() { alive = false; charts.forEach((own) => own.destroy()); },
  };
}

/** Share of prompt tokens whose states engines had kept; absent where nothing was counted. */
function derived({ values }) {
  const cached = values["engine/prompt_tokens_cached"];
  const computed = values["engine/prompt_tokens_computed"];
  if (!cached || !computed) return {};
  return { "derived/cache_hits": cached.map((own, index) => (own === null || computed[index] === null || own + computed[index] === 0 ? null : own / (own + computed[index]))) };
}
