// Figures as text, and elements for them. The same words as in scheduler/top/screen.py.

export const DASH = "–";

/** A figure with three digits or so, and its unit; a dash for what is not known. */
export function number(value, unit = "") {
  if (value === null || value === undefined) return DASH;
  if (value >= 1000) return Math.round(value).toLocaleString("en") + unit;
  if (value >= 100 || Number.isInteger(value)) return value.toFixed(0) + unit;
  return value.toFixed(value >= 10 ? 1 : 2) + unit;
}

/** A time in the unit that suits it; a dash if it is not known. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds >= 1) return number(seconds, " s");
  return seconds >= 0.001 || seconds === 0 ? number(seconds * 1000, " ms") : number(seconds * 1e6, " µs");
}

/** 0 to 1 in percent; a dash if it is not known. */
export function share(value) {
  return value === null ? DASH : `${(100 * value).toFixed(1)} %`;
}

/** An element with attributes and children. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for a part of a picture. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A row of a table: its name, and the rest. */
export function row(name, ...cells) {
  const made = cells.map((cell) => (cell instanceof Node ? make("td", {}, cell) : make("td", {}, String(cell))));
  return make("tr", {}, make("th", { scope: "row" }, name), ...made);
}
