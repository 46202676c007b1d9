// Conversations of supervised fine-tuning, as tokens, with what is trained.

import { get } from "./api.js";
import { choice, fill, h, number, visible } from "./dom.js";
import { go } from "./state.js";

export const KEY = ["file"];

export function mount(box, state, context) {
  const rows = h("div");
  let next = 0;
  let file = null;
  const more = h("button", { onclick: () => page().catch(context.fail) }, "more");
  async function load() {
    const about = await get("run", { run: state.run });
    if (!about.data_files.length) return fill(box, h("h1", null, "SFT data"), h("p", { class: "empty" }, "This run has written no conversations (data/*.jsonl); those of `--data` stay where they are."));
    file = about.data_files.includes(state.file) ? state.file : about.data_files.at(-1);
    fill(box, h("div", { class: "bar" }, h("h1", null, "SFT data"), choice("file", file, about.data_files.map((name) => [name, name]), (value) => go({ file: value })), h("span", { class: "legend" }, h("span", { class: "key q3" }, "trained"), h("span", { class: "key" }, "read only"))), rows, more);
    await page();
  }
  async function page() {
    const answer = await get("sft", { run: state.run, file, offset: next });
    for (const row of answer.rows) rows.append(conversation(row));
    next = answer.next;
    more.hidden = next === null;
  }
  function conversation(row) {
    if (row.problem) return h("article", { class: "conversation" }, h("p", { class: "error" }, `The row at byte ${row.at} cannot be read as a conversation: ${row.problem}`));
    const trained = row.mask.filter(Boolean).length;
    const box = h("article", { class: "conversation" }, h("header", { class: "muted" }, Object.entries(row.meta).map(([name, value]) => `${name} ${value}`).join(" · "), ` · ${number(row.ids.length)} tokens, ${number(trained)} trained`));
    const text = h("div", { class: "tokens" });
    row.pieces.forEach((piece, index) => {
      const token = h("span", { class: row.mask[index] ? "s q3" : "p", title: `id ${row.ids[index]}` });
      token.textContent = visible(piece).replace(/\n/g, "↵\n");
      text.append(token);
    });
    box.append(text);
    return box;
  }
  load().catch(context.fail);
  return {};
}
