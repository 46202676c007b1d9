// One step: its groups as strips of rewards, its best and its worst episode.

import { get } from "./api.js";
import { debounce, fill, h, number } from "./dom.js";
import { advantage, episodeLink, reward } from "./rows.js";
import { go, link, open } from "./state.js";

export const KEY = [];

export function mount(box, state, context) {
  let current = state;
  async function load() {
    const listed = await get("episodes", { run: state.run, limit: 1 });
    const names = Object.keys(listed.facets.stage);
    const stage = current.stage || (names.includes("rl") ? "rl" : names.at(-1));
    if (!stage) return fill(box, h("p", { class: "empty" }, "No episodes are recorded yet."));
    const newest = await get("episodes", { run: state.run, stage, limit: 1, sort: "step" });
    const step = current.step !== undefined ? Number(current.step) : newest.rows[0]?.step ?? 0;
    if (current.step === undefined || current.stage !== stage) { current = { ...current, stage, step: String(step) }; go({ stage, step }, { replace: true }); }
    const outline = await get("step", { run: state.run, stage, step });
    draw(stage, step, outline, names, newest.rows[0]?.step ?? step);
  }
  function draw(stage, step, outline, names, last) {
    const value = (name) => outline.metrics[name];
    const means = Object.keys(outline.metrics).filter((name) => /^reward\/[^/]+\/mean$/.test(name));
    const shown = [...means, "group/frac_zero_std", "response_length/mean", "policy/entropy/mean", "mismatch/kl/mean", "ratio/max", "optim/grad_norm", "staleness/mean", "time/step"];
    fill(box, h("div", { class: "bar" },
      h("button", { onclick: () => move(-1), disabled: step <= 0, title: "p" }, "‹"), h("h1", null, `${stage} step ${step + 1}`), h("button", { onclick: () => move(1), disabled: step >= last, title: "n" }, "›"),
      names.length > 1 ? names.map((name) => h("a", { class: `chip${name === stage ? " current" : ""}`, href: link("step", { stage: name }) }, name)) : null,
      h("a", { href: link("rollouts", { stage, step }) }, "as a list")),
    h("div", { class: "figures" }, shown.filter((name) => value(name) !== undefined && value(name) !== null).map((name) => h("div", { class: "figure" }, h("b", null, number(value(name))), h("span", null, name)))),
    !Object.keys(outline.metrics).length ? h("p", { class: "muted" }, "This step's metrics are not written yet, or it has none.") : null,
    h("div", { class: "extremes" }, ["best", "worst"].map((name) => outline[name] ? h("a", { href: episodeLink(outline[name]) }, `${name} episode `, h("span", { class: "mono" }, outline[name].id), " ", reward(outline[name])) : null)),
    h("table", { class: "groups" }, h("tr", null, ["group", "task", "level", "mean", "spread", "episodes: reward, advantage"].map((name) => h("th", null, name))), outline.groups.map((group) => {
      const rewards = group.rows.map((row) => row.reward).filter((own) => own !== null);
      const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
      const spread = rewards.length ? Math.sqrt(rewards.reduce((sum, own) => sum + (own - mean) ** 2, 0) / rewards.length) : null;
      return h("tr", null, h("td", null, h("a", { class: "mono", href: link("group", { stage, step, group: group.group }) }, group.group)), h("td", null, h("a", { href: link("task", { task: group.task }), title: "the same task over policy versions" }, group.task)), h("td", null, String(group.level)), h("td", null, number(mean, 3)), h("td", { class: spread === 0 ? "muted" : "" }, spread === 0 ? "flat" : number(spread, 3)),
        h("td", null, h("div", { class: "strip" }, group.rows.map((row) => cell(row)))));
    })), outline.groups.length ? null : h("p", { class: "empty" }, "No episodes of this step are recorded: it is of supervised training, or the recorder dropped them."));
  }
  function cell(row) {
    const element = h("a", { class: `cell ${row.status}`, href: episodeLink(row), title: `${row.id}: ${row.status === "scored" ? `reward ${number(row.reward)}` : row.status}, advantage ${number(row.advantage)}` }, h("i", null), row.status === "scored" ? number(row.reward, 2) : row.status, h("small", null, advantage(row.advantage)));
    element.firstChild.style.height = `${row.reward === null ? 0 : Math.max(0, Math.min(1, row.reward)) * 100}%`;
    return element;
  }
  function move(by) {
    open("step", { stage: current.stage, step: Math.max(0, Number(current.step) + by) });
  }
  load().catch(context.fail);
  return {
    update(next) {
      const same = next.stage === current.stage && next.step === current.step;
      current = next;
      if (!same) load().catch(context.fail);
    },
    changed: debounce(() => load().catch(() => {}), 200),
    key(name) {
      if (name === "n" || name === "j") return move(1), true;
      if (name === "p" || name === "k") return move(-1), true;
      return false;
    },
  };
}
