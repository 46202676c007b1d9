// How an episode, its score and its reward are shown wherever they are shown.

import { h, number } from "./dom.js";
import { link } from "./state.js";

export function episodeLink(row, changes = {}) {
  return link("episode", { stage: row.stage, step: row.step, group: row.group, episode: row.id, attempt: row.attempt > 1 ? row.attempt : null, ...changes });
}

/** The reward as a number and a bar from 0 to 1; words where there is none. */
export function reward(row) {
  if (row.status === "failed") return h("span", { class: "reward none", title: "no reward: the episode failed" }, "none");
  if (row.status === "invalid") return h("span", { class: "reward cheat", title: "refused as a cheat" }, "invalid");
  const bar = h("i", { class: "meter" }, h("i", null));
  bar.firstChild.style.width = `${Math.max(0, Math.min(1, row.reward)) * 100}%`;
  return h("span", { class: "reward" }, bar, number(row.reward, 3));
}

export function advantage(value) {
  if (value === null || value === undefined) return h("span", { class: "muted" }, "–");
  return h("span", { class: value > 0 ? "plus" : value < 0 ? "minus" : "muted" }, (value > 0 ? "+" : "") + number(value, 3));
}

export function versions(turn) {
  const [first, last] = turn.versions;
  return first === last ? `v${first}` : `v${first}–${last}`;
}

/** Names and values side by side; values may be elements. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}
