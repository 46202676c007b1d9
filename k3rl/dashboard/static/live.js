// Rollouts as they are recorded, turn by turn, newest below; it stays where the reader is when the reader scrolled up.

import { get } from "./api.js";
import { debounce, fill, h, number } from "./dom.js";
import { link } from "./state.js";

export const KEY = [];
const MOST = 400;

export function mount(box, state, context) {
  const feed = h("div", { class: "feed", tabindex: "0" });
  const status = h("span", { class: "muted" });
  const pause = h("button", { onclick: () => { paused = !paused; pause.textContent = paused ? "go on" : "hold"; if (!paused) pull(); } }, "hold");
  fill(box, h("div", { class: "bar" }, h("h1", null, "Live rollouts"), pause, status), feed);
  let after = null;
  let paused = false;
  let pulling = false;
  let again = false;
  let alive = true;

  async function pull() {
    if (paused || !alive) return;
    if (pulling) { again = true; return; }
    pulling = true;
    try {
      do {
        again = false;
        const answer = await get("turns", { run: state.run, after });
        if (!alive) return;
        const bottom = feed.scrollHeight - feed.scrollTop - feed.clientHeight < 80;
        if (answer.skipped) feed.append(h("p", { class: "muted" }, `${number(answer.skipped)} episodes went by faster than this page shows them; they are in the list`));
        for (const row of answer.rows) feed.append(row.kind === "turn" ? turn(row) : end(row));
        while (feed.children.length > MOST) feed.firstChild.remove();
        if (bottom) feed.scrollTop = feed.scrollHeight;
        if (answer.rows.length === 0 || answer.next === after) { after = answer.next; break; }
        after = answer.next;
        again = true;
      } while (again && !paused);
      status.textContent = feed.children.length ? "" : "Nothing is recorded yet; turns appear here as they are.";
    } catch (error) {
      context.fail(error);
    } finally {
      pulling = false;
    }
  }

  function turn(row) {
    const [first, last] = row.versions;
    return h("article", { class: "liveturn" }, h("header", null, h("a", { class: "mono", href: link("episode", { episode: row.episode, branch: row.branch, turn: row.turn }) }, row.episode), ` turn ${row.turn + 1} · v${first}${last === first ? "" : `–${last}`} · ${number(row.sampled_tokens)} tokens · ${row.stop_reason}`),
      h("pre", { class: "p" }, tail(row.prompt)), h("pre", { class: "s" }, row.sampled));
  }

  function end(row) {
    const score = row.score || {};
    const said = score.status === "scored" ? `reward ${number(score.reward, 3)}` : score.status === "invalid" ? `invalid: ${score.hack}` : `no reward: ${score.reason}`;
    return h("p", { class: `liveend ${score.status}` }, h("span", { class: "mono" }, row.episode), ` ${said} · ${row.task} · step ${row.step + 1}`);
  }

  function tail(text) {
    return text.length > 400 ? `… ${text.slice(-400)}` : text;
  }

  pull();
  return { changed: debounce(pull, 20), destroy() { alive = false; } };
}
