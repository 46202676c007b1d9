// What a run is: how it stands, the command, the configuration (beside that of other runs), its log.

import { fileAddress, get } from "./api.js";
import { debounce, fill, h } from "./dom.js";
import { facts } from "./rows.js";

export const KEY = [];

export function mount(box, state, context) {
  let filter = "";
  const configuration = h("div");
  const log = h("pre", { class: "log" });
  let abouts = [];
  async function load() {
    abouts = await Promise.all(context.runs.map((run) => get("run", { run })));
    const [about] = abouts;
    const time = (value) => (value ? new Date(value * 1000).toLocaleString() : null);
    fill(box, h("div", { class: "bar" }, h("h1", null, about.name), h("span", { class: `status ${about.status}` }, about.status), h("a", { href: fileAddress("run", { run: state.run }) }, "save as HTML"), h("a", { href: fileAddress("perfetto", { run: state.run }) }, "save for Perfetto")),
      about.error ? h("p", { class: "error" }, about.error) : null, (about.notes || []).map((note) => h("p", { class: "note" }, note)),
      facts([["pipeline", about.pipeline], ["attempt", about.attempt], ["started", time(about.started)], ["ended", time(about.ended)], ["episodes", about.episodes], ["configuration", about.config_hash?.slice(0, 12)], ["commit", about.git?.commit?.slice(0, 12)], ["damaged lines", about.damaged_lines || null]]),
      about.command ? h("pre", null, about.command) : null,
      facts(Object.entries(about.versions || {})),
      h("h2", null, abouts.length > 1 ? "Configuration, where the runs differ first" : "Configuration"), h("input", { type: "search", placeholder: "keys", "aria-label": "configuration keys", oninput: (event) => { filter = event.target.value; drawConfiguration(); } }), configuration, h("h2", null, "Log of the driver"), log);
    drawConfiguration();
    await follow();
  }
  function drawConfiguration() {
    const flats = abouts.map((about) => flat(about.config || {}));
    const keys = [...new Set(flats.flatMap((own) => [...own.keys()]))].filter((key) => key.includes(filter));
    const differs = (key) => new Set(flats.map((own) => own.get(key))).size > 1;
    keys.sort((a, b) => Number(differs(b)) - Number(differs(a)));
    fill(configuration, h("table", { class: "config" }, flats.length > 1 ? h("tr", null, h("th", null, "key"), abouts.map((about) => h("th", null, about.name))) : null, keys.map((key) => h("tr", { class: differs(key) ? "differs" : "" }, h("td", { class: "mono" }, key), flats.map((own) => h("td", { class: "mono" }, own.get(key) ?? "–"))))));
  }
  function flat(tree, prefix = "", found = new Map()) {
    for (const [name, value] of Object.entries(tree)) {
      if (value && typeof value === "object" && !Array.isArray(value)) flat(value, `${prefix}${name}.`, found);
      else found.set(prefix + name, JSON.stringify(value));
    }
    return found;
  }
  async function follow() {
    const bottom = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const { text } = await get("log", { run: state.run });
    fill(log, text || "There is no log of the driver.");
    if (bottom) log.scrollTop = log.scrollHeight;
  }
  load().catch(context.fail);
  return { changed: debounce(() => follow().catch(() => {}), 300) };
}
