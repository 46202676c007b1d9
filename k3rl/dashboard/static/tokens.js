// The tokens of a branch, however many: blocks that are filled when they come near the screen and emptied behind it.

import { get } from "./api.js";
import { colour } from "./colours.js";
import { h, fill, number, visible } from "./dom.js";

const BLOCK = 500;
const WINDOW = 4000;

export class TokenView {
  /** @param {{run: string, episode: string, attempt: number, branch: string, total: number, turns: any[], trained: number | null}} about */
  constructor(about, onToken) {
    Object.assign(this, about);
    this.onToken = onToken;
    this.scale = "none";
    this.windows = new Map();
    this.filled = new Set();
    this.matches = [];
    this.matched = new Set();
    this.marked = null;
    this.byTurn = new Map(this.turns.map((turn) => [turn.turn, turn]));
    const newest = this.trained ?? Math.max(...this.turns.map((turn) => turn.versions[1]));
    this.age = new Map(this.turns.map((turn) => [turn.turn, newest - turn.versions[0]]));
    this.element = h("div", { class: "tokens" });
    this.blocks = [];
    for (let start = 0; start < this.total; start += BLOCK) {
      const block = h("div", { class: "block" });
      block.style.minHeight = `${Math.ceil(Math.min(BLOCK, this.total - start) / 24) * 20}px`;
      block.dataset.index = String(this.blocks.length);
      this.blocks.push(block);
    }
    fill(this.element, this.blocks);
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const index = Number(entry.target.dataset.index);
        if (entry.isIntersecting) this.draw(index);
        else this.empty(index);
      }
    }, { rootMargin: "1200px 0px" });
    this.blocks.forEach((block) => this.observer.observe(block));
    this.element.addEventListener("mouseover", (event) => this.point(event));
    this.element.addEventListener("click", (event) => this.point(event, true));
  }

  window(index) {
    const start = Math.floor(index / WINDOW) * WINDOW;
    if (!this.windows.has(start)) {
      const { run, episode, attempt, branch } = this;
      this.windows.set(start, get("tokens", { run, episode, attempt, branch, start, count: WINDOW }));
    }
    return this.windows.get(start);
  }

  async draw(index) {
    if (this.filled.has(index)) return;
    this.filled.add(index);
    try {
      const window = await this.window(index * BLOCK);
      if (!this.filled.has(index)) return;
      this.paint(index, window);
    } catch (error) {
      fill(this.blocks[index], h("p", { class: "error" }, error.message));
    }
  }

  paint(index, window) {
    const block = this.blocks[index];
    const parts = [];
    const begin = index * BLOCK - window.start;
    const end = Math.min(begin + BLOCK, window.ids.length);
    for (let i = begin; i < end; i++) {
      const place = window.start + i;
      const turn = window.turns[i];
      const first = place === 0 || (i > 0 ? window.turns[i - 1] !== turn : this.startOf(turn) === place);
      if (first) parts.push(this.header(turn, 0));
      const sampled = window.kinds[i] === 1;
      if (sampled && this.sampledAt(turn) === place) parts.push(this.header(turn, 1));
      parts.push(this.token(window, i, place, sampled));
    }
    fill(block, parts);
    block.style.minHeight = "";
  }

  startOf(turn) {
    return this.byTurn.get(turn)?.start;
  }

  sampledAt(turn) {
    const own = this.byTurn.get(turn);
    return own ? own.start + own.prompt_tokens : -1;
  }

  header(turn, kind) {
    const own = this.byTurn.get(turn);
    if (!own) return null;
    const [first, last] = own.versions;
    const facts = kind === 0 ? `${number(own.prompt_tokens)} tokens the policy read` : `${number(own.sampled_tokens)} tokens it sampled · weights v${first}${last === first ? "" : `–${last}`} · ${own.stop_reason} · model ${number(own.model_s, 3)} s, environment ${number(own.env_s, 3)} s`;
    return h("div", { class: `turnhead${kind ? " sampled" : ""}`, id: kind ? null : `turn-${turn}` }, h("b", null, kind ? "sampled" : `turn ${turn + 1}`), " ", facts);
  }

  token(window, i, place, sampled) {
    const piece = window.pieces ? window.pieces[i] : `⟨${window.ids[i]}⟩`;
    const special = window.special?.[i];
    const shown = visible(piece).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
    const kind = `${sampled ? "s" : "p"}${special ? " special" : ""} ${colour(this.scale, window, i, this.age)}${this.matched.has(place) ? " found" : ""}${this.marked === place ? " marked" : ""}`;
    const element = document.createElement("span");
    element.className = kind;
    element.textContent = shown === "" ? "∅" : shown;
    element.dataset.t = String(place);
    return element;
  }

  empty(index) {
    if (!this.filled.has(index)) return;
    const block = this.blocks[index];
    const height = block.offsetHeight;
    this.filled.delete(index);
    block.style.minHeight = `${height}px`;
    fill(block);
  }

  redraw() {
    for (const index of [...this.filled]) this.window(index * BLOCK).then((window) => this.filled.has(index) && this.paint(index, window)).catch(() => {});
  }

  async recolour(scale) {
    this.scale = scale;
    this.redraw();
  }

  forget() {
    this.windows.clear();
    this.redraw();
  }

  async point(event, chosen = false) {
    const text = event.target.dataset?.t;
    if (text === undefined) return;
    const place = Number(text);
    const window = await this.window(place);
    this.onToken(this.describe(window, place), chosen);
  }

  describe(window, place) {
    const i = place - window.start;
    const turn = this.byTurn.get(window.turns[i]);
    const at = (name) => window[name]?.[i] ?? null;
    return { place, id: window.ids[i], piece: window.pieces?.[i] ?? null, special: at("special"), sampled: window.kinds[i] === 1, turn: window.turns[i], versions: turn?.versions, logprob: at("logprobs"), learner: at("learner_logprobs"), ratio: at("ratios"), entropy: at("entropies"), advantage: at("advantages"), trained: at("trained") };
  }

  /** Brings a token to the middle of the screen and marks it. */
  async show(place) {
    if (!(place >= 0 && place < this.total)) return;
    this.marked = place;
    const index = Math.floor(place / BLOCK);
    this.blocks[index].scrollIntoView({ block: "center" });
    await this.draw(index);
    const window = await this.window(place);
    this.paint(index, window);
    this.redraw();
    this.blocks[index].querySelector(`[data-t="${place}"]`)?.scrollIntoView({ block: "center" });
    this.onToken(this.describe(window, place), false);
  }

  /** Finds a text in all tokens; returns how often it occurs. */
  async find(text) {
    this.matches = [];
    this.matched.clear();
    if (text) {
      const starts = [];
      let whole = "";
      for (let start = 0; start < this.total; start += WINDOW) {
        const window = await this.window(start);
        if (!window.pieces) return 0;
        for (const piece of window.pieces) {
          starts.push(whole.length);
          whole += piece.toLowerCase();
        }
      }
      const needle = text.toLowerCase();
      let token = 0;
      for (let at = whole.indexOf(needle); at >= 0; at = whole.indexOf(needle, at + needle.length)) {
        while (token + 1 < starts.length && starts[token + 1] <= at) token++;
        this.matches.push(token);
        for (let next = token; next < starts.length && starts[next] < at + needle.length; next++) this.matched.add(next);
      }
    }
    this.redraw();
    return this.matches.length;
  }

  destroy() {
    this.observer.disconnect();
  }
}
