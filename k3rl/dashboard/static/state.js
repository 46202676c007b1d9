// What is on the screen, in the address behind the hash: a copied address shows the same.

const listeners = new Set();

/** @returns {Record<string, string>} */
export function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** The address of this view with changes; null takes a key out. */
export function address(changes, base = read()) {
  const values = { ...base, ...changes };
  const kept = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return "#" + new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
}

/** Goes there. `replace` leaves no step behind in the browser's history. */
export function go(changes, { replace = false, base = read() } = {}) {
  const target = address(changes, base);
  if (target === location.hash) return;
  if (replace) {
    history.replaceState(null, "", target);
    for (const listener of listeners) listener(read());
  } else {
    location.hash = target;
  }
}

/** Another view of the same runs, without what the last one had chosen. */
export function view(name, changes = {}) {
  const { run, with: others } = read();
  return { view: name, run, with: others, ...changes };
}

export function open(name, changes = {}) {
  go(view(name, changes), { base: {} });
}

export function link(name, changes = {}) {
  return address(view(name, changes), {});
}

export function onChange(listener) {
  listeners.add(listener);
}

window.addEventListener("hashchange", () => {
  for (const listener of listeners) listener(read());
});
