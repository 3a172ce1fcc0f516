// Small plots of the last minutes.

import { DASH, draw, make } from "./format.js";

const NUM_COLOURS = 6;

/** Owns one plot and its points. */
export class Plot {
  /** `read` returns the figures to draw by their names; `format` writes one of them. */
  constructor(title, read, format, numPoints) {
    this.title = title;
    this.read = read;
    this.format = format;
    this.numPoints = numPoints;
    this.points = [];
    this.scale = make("span", { class: "scale" });
    this.picture = draw("svg", { role: "img", viewBox: `0 0 ${numPoints - 1} 100`, preserveAspectRatio: "none" });
    this.legend = make("ul", { class: "legend" });
    this.element = make("figure", {}, make("figcaption", {}, title, this.scale), this.picture, this.legend);
  }

  /** Take in the newest figures; null: nothing is known of this time. */
  add(figures) {
    this.points.push(figures === null ? {} : (this.read(figures) ?? {}));
    if (this.points.length > this.numPoints) this.points.shift();
    this.#redraw();
  }

  #redraw() {
    const names = [...new Set(this.points.flatMap((point) => Object.keys(point)))];
    const values = this.points.flatMap((point) => Object.values(point)).filter((value) => value !== null);
    const most = values.length ? Math.max(...values) : 0;
    const last = this.points.at(-1) ?? {};
    const words = names.map((name) => `${name} ${this.format(last[name] ?? null)}`);
    this.scale.textContent = most > 0 ? `to ${this.format(most)}` : "";
    this.picture.setAttribute("aria-label", `${this.title}, now: ${words.join(", ") || DASH}`);
    this.picture.replaceChildren(
      ...names.map((name, i) => draw("path", { class: `s${i % NUM_COLOURS}`, d: this.#line(name, most) })),
    );
    this.legend.replaceChildren(
      ...names.map((name, i) =>
        make("li", {}, make("span", { class: `swatch s${i % NUM_COLOURS}` }), `${name} `,
          make("b", {}, this.format(last[name] ?? null))),
      ),
    );
    if (!names.length) this.legend.replaceChildren(make("li", {}, DASH));
  }

  #line(name, most) {
    const start = this.numPoints - this.points.length;
    let pen = "M";
    let line = "";
    this.points.forEach((point, i) => {
      const value = point[name] ?? null;
      // Half a stroke of room above and below.
      if (value !== null) line += `${pen}${start + i} ${(97 - (94 * value) / (most || 1)).toFixed(2)}`;
      pen = value === null ? "M" : "L";
    });
    return line;
  }
}
