// A long list of rows of one height, of which only those on the screen exist. Rows come in pages from the server.

import { h, fill } from "./dom.js";

const PAGE = 200;

export class VirtualList {
  /**
   * @param {object} options
   * @param {(offset: number, limit: number) => Promise<{total: number, rows: any[]}>} options.load
   * @param {(row: any, index: number) => HTMLElement} options.draw one row
   * @param {number} options.rowHeight pixels
   */
  constructor({ load, draw, rowHeight, onTotal = () => {} }) {
    Object.assign(this, { load, draw, rowHeight, onTotal });
    this.spacer = h("div", { class: "spacer" });
    this.window = h("div", { class: "window" });
    this.element = h("div", { class: "virtual", tabindex: "0", role: "listbox" }, this.spacer, this.window);
    this.element.addEventListener("scroll", () => this.paint());
    this.observer = new ResizeObserver(() => this.paint());
    this.observer.observe(this.element);
    this.generation = 0;
    this.pages = new Map();
    this.total = 0;
    this.selected = -1;
  }

  /** Asks again from the first row. Rows on the screen stay until the answer is there. */
  async reload() {
    const generation = ++this.generation;
    const first = await this.load(0, PAGE);
    if (generation !== this.generation) return;
    this.pages = new Map([[0, first.rows]]);
    this.total = first.total;
    this.waiting = new Set();
    this.spacer.style.height = `${this.total * this.rowHeight}px`;
    this.onTotal(first);
    this.paint();
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  async want(page) {
    if (this.pages.has(page) || this.waiting?.has(page)) return;
    const generation = this.generation;
    this.waiting.add(page);
    const answer = await this.load(page * PAGE, PAGE);
    if (generation !== this.generation) return;
    this.pages.set(page, answer.rows);
    this.paint();
  }

  paint() {
    const top = Math.floor(this.element.scrollTop / this.rowHeight);
    const count = Math.ceil(this.element.clientHeight / this.rowHeight) + 2;
    const begin = Math.max(0, top - 2);
    const end = Math.min(this.total, top + count);
    const rows = [];
    for (let index = begin; index < end; index++) {
      const row = this.row(index);
      if (row === undefined) {
        this.want(Math.floor(index / PAGE));
        rows.push(h("div", { class: "row pending" }, "…"));
        continue;
      }
      const element = this.draw(row, index);
      element.classList.add("row");
      if (index === this.selected) element.classList.add("selected");
      rows.push(element);
    }
    fill(this.window, rows);
    this.window.style.transform = `translateY(${begin * this.rowHeight}px)`;
  }

  /** Moves the selection and keeps it on the screen; returns its row. */
  move(by) {
    this.selected = Math.min(this.total - 1, Math.max(0, this.selected + by));
    const top = this.selected * this.rowHeight;
    const element = this.element;
    if (top < element.scrollTop) element.scrollTop = top;
    if (top + this.rowHeight > element.scrollTop + element.clientHeight) {
      element.scrollTop = top + this.rowHeight - element.clientHeight;
    }
    this.paint();
    return this.row(this.selected);
  }

  get atTop() {
    return this.element.scrollTop < this.rowHeight;
  }

  destroy() {
    this.generation++;
    this.observer.disconnect();
  }
}
