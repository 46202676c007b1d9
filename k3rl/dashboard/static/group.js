// A group side by side: what each episode of one task wrote, with its reward and its advantage.

import { get } from "./api.js";
import { fill, h, number } from "./dom.js";
import { advantage, episodeLink, facts, reward } from "./rows.js";
import { link, open } from "./state.js";

export const KEY = ["group"];

export function mount(box, state, context) {
  let rows = [];
  let selected = 0;
  async function load() {
    const group = await get("group", { run: state.run, group: state.group });
    rows = group.rows;
    const rewards = rows.map((row) => row.reward).filter((own) => own !== null);
    const best = rows.reduce((a, b) => ((b.reward ?? -Infinity) > (a.reward ?? -Infinity) ? b : a));
    fill(box, h("div", { class: "bar" }, h("h1", null, `Group ${group.group}`), h("a", { href: link("task", { task: group.task }) }, "the same task over policy versions")),
      facts([["task", group.task], ["step", `${group.stage} ${group.step + 1}`], ["rewards", rewards.length ? `${number(Math.min(...rewards), 3)} to ${number(Math.max(...rewards), 3)}` : "none"]]),
      h("details", { class: "prompt" }, h("summary", null, "prompt"), h("pre", null, group.prompt)),
      h("div", { class: "columns" }, rows.map((row, index) => h("article", { class: `column${index === selected ? " selected" : ""}` },
        h("header", null, h("a", { class: "mono", href: episodeLink(row) }, row.id), h("span", null, "reward ", reward(row)), h("span", null, "advantage ", advantage(row.advantage)), h("span", { class: "muted" }, `${row.stop_reason}, ${row.sampled_tokens} tokens`),
          row.score?.parts ? h("small", null, Object.entries(row.score.parts).map(([name, value]) => `${name} ${number(value, 3)}`).join("  ")) : null,
          row.score?.reason || row.score?.hack ? h("small", { class: "error" }, row.score.reason || row.score.hack) : null,
          row.id !== best.id ? h("a", { href: link("task", { task: group.task, a: row.id, b: best.id }) }, "compare with the best") : null),
        h("pre", null, row.text || "(nothing was sampled)", row.cut ? `\n… ${number(row.cut)} more characters` : "")))));
  }
  load().catch(context.fail);
  return {
    key(name) {
      if (name === "j" || name === "k") {
        selected = Math.max(0, Math.min(rows.length - 1, selected + (name === "j" ? 1 : -1)));
        box.querySelectorAll(".column").forEach((column, index) => {
          column.classList.toggle("selected", index === selected);
          if (index === selected) column.scrollIntoView({ block: "nearest", inline: "nearest" });
        });
        return true;
      }
      if (name === "Enter" && rows[selected]) return (location.hash = episodeLink(rows[selected])), true;
      if (name === "n" || name === "p") return neighbour(name === "n" ? 1 : -1), true;
      return false;
    },
  };
  async function neighbour(by) {
    if (!rows.length) return;
    const { groups } = await get("step", { run: state.run, stage: rows[0].stage, step: rows[0].step });
    const names = groups.map((group) => group.group);
    const next = names[names.indexOf(state.group) + by];
    if (next) open("group", { stage: rows[0].stage, step: rows[0].step, group: next });
  }
}
