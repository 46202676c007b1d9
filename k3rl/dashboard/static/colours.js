// What the colour of a token can say: each scale has a legend with numbers, and steps that differ in lightness.

import { h, number } from "./dom.js";

const SURPRISE = [0.05, 0.25, 0.7, 1.5, 3];
const SIGNED = [0.02, 0.1, 0.3, 1];

/** name -> {label, stream, value(window, i), bounds, signed} */
export const SCALES = {
  none: { label: "nothing" },
  logprob: { label: "sampler logprob", value: (w, i) => negative(w.logprobs?.[i]), bounds: SURPRISE, legend: "−logprob in nats: how surprising the token was to the policy that sampled it" },
  learner: { label: "learner logprob", value: (w, i) => negative(w.learner_logprobs?.[i]), bounds: SURPRISE, legend: "−logprob in nats, by the learner, before it trained on the token" },
  entropy: { label: "entropy", value: (w, i) => w.entropies?.[i], bounds: SURPRISE, legend: "entropy of the learner's next-token distribution, nats" },
  difference: { label: "sampler–learner difference", value: (w, i) => difference(w, i), bounds: [0.0005, 0.005, 0.05, 0.5], signed: true, legend: "learner logprob − sampler logprob, nats" },
  advantage: { label: "advantage", value: (w, i) => w.advantages?.[i], bounds: SIGNED, signed: true, legend: "advantage of the token" },
  mask: { label: "loss mask", value: (w, i) => (w.trained ? (w.trained[i] ? 1 : 0) : null), bounds: [0.5], legend: "1: the learner trained on the token; 0: it did not" },
  version: { label: "staleness", value: (w, i, turns) => (w.kinds[i] === 1 ? turns.get(w.turns[i]) : null), bounds: [], legend: "trainings between the weights that sampled a token and those that trained on it; before that is recorded, versions before the newest of the episode" },
};

function negative(value) {
  return value === null || value === undefined ? null : -value;
}

function difference(w, i) {
  const own = w.learner_logprobs?.[i];
  const sampled = w.logprobs?.[i];
  return own === null || own === undefined || sampled === null || sampled === undefined ? null : own - sampled;
}

/** The class of a token; "" where nothing was recorded for it. */
export function colour(scale, window, index, turns) {
  const { value, bounds, signed } = SCALES[scale] || SCALES.none;
  if (!value) return "";
  const found = value(window, index, turns);
  if (found === null || found === undefined) return "";
  if (scale === "version") return `q${Math.max(0, Math.min(5, Math.round(found)))}`;
  if (scale === "mask") return found ? "q3" : "masked";
  const size = signed ? Math.abs(found) : found;
  const bin = bounds.filter((bound) => size >= bound).length;
  if (!signed) return `q${bin}`;
  return bin === 0 ? "z0" : `${found < 0 ? "m" : "z"}${bin}`;
}

export function legend(scale) {
  const { legend: meaning, bounds, signed } = SCALES[scale] || SCALES.none;
  if (!meaning) return h("span", { class: "legend muted" }, "sampled tokens are underlined, the prompt is grey");
  const keys = [];
  if (scale === "mask") keys.push(["q3", "trained"], ["masked", "not"]);
  else if (scale === "version") for (let i = 0; i < 6; i++) keys.push([`q${i}`, i === 5 ? "5 or more" : String(i)]);
  else if (signed) {
    for (let i = bounds.length; i > 0; i--) keys.push([`m${i}`, `≤ −${number(bounds[i - 1])}`]);
    keys.push(["z0", "0"]);
    for (let i = 1; i <= bounds.length; i++) keys.push([`z${i}`, `≥ ${number(bounds[i - 1])}`]);
  } else {
    keys.push(["q0", `< ${number(bounds[0])}`]);
    bounds.forEach((bound, i) => keys.push([`q${i + 1}`, `≥ ${number(bound)}`]));
  }
  return h("span", { class: "legend" }, keys.map(([name, label]) => h("span", { class: `key ${name}` }, label)), h("span", { class: "muted" }, meaning, "; unmarked: not recorded"));
}
