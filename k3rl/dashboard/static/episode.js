// One episode: how it was judged, its turns as a tree, and its exact tokens.

import { fileAddress, get } from "./api.js";
import { SCALES, legend } from "./colours.js";
import { choice, debounce, fill, h, number } from "./dom.js";
import { advantage, facts, reward, versions } from "./rows.js";
import { go, link, open, read } from "./state.js";
import { TokenView } from "./tokens.js";

export const KEY = ["episode", "attempt", "branch"];

export function mount(box, state, context) {
  let current = state;
  let episode = null;
  let view = null;
  let turn = 0;
  let match = -1;
  const head = h("div");
  const tree = h("nav", { class: "tree", "aria-label": "turns" });
  const tools = h("div", { class: "bar tools" });
  const detail = h("div", { class: "detail", "aria-live": "polite" });
  const tokens = h("div", { class: "tokenbox" });
  const count = h("span", { class: "muted" });

  async function load() {
    episode = await get("episode", { run: state.run, episode: state.episode, attempt: state.attempt });
    const names = Object.keys(episode.branches);
    const branch = names.includes(state.branch) ? state.branch : names[0];
    drawHead();
    fill(box, head, h("div", { class: "split" }, tree, h("div", { class: "reading" }, tools, tokens)), detail);
    if (branch === undefined) return fill(tokens, h("p", { class: "empty" }, "This episode has no turns: it ended before the policy acted."));
    drawTree(names, branch);
    const turns = episode.turns.filter((own) => own.branch === branch);
    view = new TokenView({ run: state.run, episode: episode.id, attempt: episode.attempt, branch, total: episode.branches[branch], turns, trained: episode.trained_version }, drawToken);
    fill(tokens, view.element);
    drawTools();
    await view.recolour(scale(current));
    if (current.find) await find(current.find, false);
    if (current.tok !== undefined) await view.show(Number(current.tok));
    else if (current.turn !== undefined) showTurn(Number(current.turn));
  }

  const scale = (of) => (SCALES[of.colour] ? of.colour : "logprob");

  function drawHead() {
    const score = episode.row.score || {};
    const parts = Object.entries(score.parts || {});
    fill(head, h("div", { class: "bar" }, h("h1", { class: "mono" }, episode.id), reward(episode), h("span", null, "advantage ", advantage(episode.advantage)),
      h("a", { href: link("group", { stage: episode.stage, step: episode.step, group: episode.group }) }, "its group"),
      h("a", { href: link("task", { task: episode.task, a: episode.id }) }, "the same task over policy versions"),
      h("a", { href: fileAddress("episode", { run: state.run, episode: episode.id, attempt: episode.attempt }) }, "save as HTML")),
    facts([["task", episode.task], ["step", `${episode.stage} ${episode.step + 1}`], ["ended by", episode.stop_reason], ["turns", episode.row.turns], ["sampled", `${number(episode.sampled_tokens)} tokens`], ["attempt", episode.attempt > 1 ? episode.attempt : null],
      ...parts.map(([name, value]) => [`part ${name}`, number(value)]), ...Object.entries(episode.row.metrics || {}).map(([name, value]) => [name, number(value)]), ...Object.entries(episode.row.budgets_used || {}).map(([name, value]) => [`used ${name}`, number(value)])]),
    score.reason ? h("p", { class: "error" }, "no reward: ", score.reason) : null,
    score.hack ? h("p", { class: "error" }, "refused as a cheat (", score.hack, "): ", JSON.stringify(score.evidence)) : null,
    episode.learner ? h("p", { class: "muted" }, "Learner values are unavailable: ", episode.learner, ".") : null,
    episode.row.answer ? h("details", null, h("summary", null, "answer that was graded"), h("pre", null, episode.row.answer)) : null);
  }

  function drawTree(names, branch) {
    const parents = new Map(episode.turns.map((own) => [own.branch, own.parent]));
    const depth = (name, seen = 0) => (parents.get(name) && names.includes(parents.get(name)) && seen < 20 ? 1 + depth(parents.get(name), seen + 1) : 0);
    fill(tree, names.map((name) => {
      const element = h("div", { class: `branch${name === branch ? " current" : ""}` }, h("a", { href: link("episode", { ...kept(), branch: name }) }, names.length > 1 ? (depth(name) ? `↳ ${name}` : name) : "turns", h("small", null, ` ${number(episode.branches[name])} tokens`)),
        h("ol", null, episode.turns.filter((own) => own.branch === name).map((own) => h("li", { "data-turn": own.turn }, h("a", { href: link("episode", { ...kept(), branch: name, turn: own.turn }) }, h("b", null, String(own.turn + 1)), ` ${number(own.sampled_tokens)} tok`, h("small", null, ` ${versions(own)} ${own.stop_reason}`), own.images ? h("small", null, ` ${own.images.length} image${own.images.length > 1 ? "s" : ""}`) : null), meter(own)))));
      element.style.marginLeft = `${depth(name) * 12}px`;
      return element;
    }));
  }

  function kept() {
    return { stage: episode.stage, step: episode.step, group: episode.group, episode: episode.id, attempt: state.attempt, colour: read().colour };
  }

  /** How long model and environment took, beside the longest turn of the episode. */
  function meter(own) {
    const longest = Math.max(...episode.turns.map((each) => each.model_s + each.env_s), 1e-9);
    const bar = h("i", { class: "times", title: `model ${number(own.model_s, 3)} s, environment ${number(own.env_s, 3)} s` }, h("i", { class: "model" }), h("i", { class: "env" }));
    bar.firstChild.style.width = `${(own.model_s / longest) * 100}%`;
    bar.lastChild.style.width = `${(own.env_s / longest) * 100}%`;
    return bar;
  }

  function drawTools() {
    const has = { learner: "learner_logprobs", entropy: "entropies", difference: "learner_logprobs", advantage: "advantages", mask: "advantages" };
    const offered = Object.entries(SCALES).filter(([name]) => !has[name] || episode.streams.includes(has[name]));
    fill(tools, choice("colour", scale(current), offered.map(([name, { label }]) => [name, label]), (value) => go({ colour: value }, { replace: true })),
      h("input", { type: "search", placeholder: "find in this episode", "aria-label": "find in this episode", value: current.find || "", onchange: (event) => { go({ find: event.target.value || null, tok: null }, { replace: true }); } }), count, legend(scale(current)));
  }

  async function find(text, jump = true) {
    count.textContent = text ? "…" : "";
    const found = await view.find(text);
    match = -1;
    count.textContent = text ? `${number(found)} found${found ? ", n and p go through them" : ""}` : "";
    if (found && (jump || current.tok === undefined)) nextMatch(1);
  }

  function nextMatch(by) {
    if (!view.matches.length) return;
    match = (match + by + view.matches.length) % view.matches.length;
    view.show(view.matches[match]);
  }

  function drawToken(token, chosen) {
    if (chosen) { go({ tok: token.place }, { replace: true }); view.marked = token.place; view.redraw(); }
    const value = (own) => (own === null ? "not recorded" : number(own, 5));
    fill(detail, h("b", { class: "mono" }, token.piece === null ? "text unavailable" : JSON.stringify(token.piece)), facts([["token", number(token.place)], ["id", token.id], ["kind", `${token.sampled ? "sampled" : "prompt"}${token.special ? ", special" : ""}`], ["turn", token.turn + 1],
      ...(token.sampled ? [["version", token.versions ? versions(token) : null], ["staleness", token.versions && episode.trained_version !== null ? number(episode.trained_version - token.versions[0]) : "not recorded"], ["sampler logprob", value(token.logprob)], ["learner logprob", value(token.learner)], ["ratio", value(token.ratio)], ["entropy", value(token.entropy)], ["advantage", value(token.advantage)], ["trained", token.trained === null ? "not recorded" : token.trained ? "yes" : "no"]] : [])]));
  }

  function showTurn(which) {
    const turns = view.turns;
    turn = Math.max(0, Math.min(turns.length - 1, turns.findIndex((own) => own.turn === which)));
    const own = turns[turn];
    if (!own) return;
    tree.querySelectorAll("li").forEach((item) => item.classList.remove("selected"));
    tree.querySelectorAll(".branch.current li")[turn]?.classList.add("selected");
    view.show(Math.min(view.total - 1, own.start + (own.sampled_tokens ? own.prompt_tokens : 0)));
  }

  load().catch(context.fail);
  return {
    update(next) {
      const before = current;
      current = next;
      if (!view) return;
      if (scale(before) !== scale(next)) { view.recolour(scale(next)); drawTools(); }
      if (before.find !== next.find) find(next.find || "").catch(() => {});
      if (before.turn !== next.turn && next.turn !== undefined) showTurn(Number(next.turn));
    },
    changed: debounce(async () => {
      if (!episode?.learner) return;
      const again = await get("episode", { run: state.run, episode: episode.id, attempt: episode.attempt });
      if (again.learner === episode.learner && again.advantage === episode.advantage) return;
      episode = again; // the learner has trained on it meanwhile
      drawHead();
      drawTools();
      view?.forget();
    }, 300),
    key(name) {
      if (!view) return false;
      if (name === "j" || name === "k") {
        const own = view.turns[turn + (name === "j" ? 1 : -1)];
        if (own) go({ turn: own.turn, tok: null }, { replace: true });
        return true;
      }
      if ((name === "n" || name === "p") && view.matches.length) return nextMatch(name === "n" ? 1 : -1), true;
      if (name === "n" || name === "p") return neighbour(name === "n" ? 1 : -1), true;
      if (name === "c") {
        const names = [...tools.querySelectorAll("option")].map((option) => option.value);
        return go({ colour: names[(names.indexOf(scale(current)) + 1) % names.length] }, { replace: true }), true;
      }
      return false;
    },
    destroy() { view?.destroy(); },
  };

  async function neighbour(by) {
    const { rows } = await get("episodes", { run: state.run, group: episode.group, order: "asc" });
    const next = rows[rows.findIndex((row) => row.id === episode.id) + by];
    if (next) open("episode", { stage: next.stage, step: next.step, group: next.group, episode: next.id, colour: read().colour });
  }
}
