// Elements and texts. Everything that a model, a tool or a file wrote reaches the page through `text` and textContent.

/**
 * An element. Properties that are functions listen (`onclick`), `class`, `title` and the like are attributes.
 * @param {string} tag
 * @param {Record<string, any> | null} [properties]
 * @param {...any} children nodes, or texts, which are shown as they are
 */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected" || name === "disabled") element[name] = value;
    else if (name !== "style") element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

// Control, format (bidirectional marks, zero width), private and unassigned characters: what prints nothing, or lies.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029\u3164\u115f\u1160\u00ad]/gu;

/** The text with every character that would not show made visible; newlines and tabs stay. */
export function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (character === "\n" || character === "\t") return character;
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 60) return `${number(value, 3)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(unixSeconds) {
  const past = Date.now() / 1000 - unixSeconds;
  if (past < 5) return "now";
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  if (past < 130000) return `${Math.round(past / 3600)} h ago`;
  return `${Math.round(past / 86400)} d ago`;
}

/** A select of [value, label] pairs. */
export function choice(label, value, options, onchange) {
  const select = h("select", { "aria-label": label, onchange: () => onchange(select.value) });
  for (const [own, shown] of options) select.append(h("option", { value: own, selected: own === (value ?? "") }, shown));
  return h("label", { class: "choice" }, h("span", null, label), select);
}

export function debounce(call, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
}
