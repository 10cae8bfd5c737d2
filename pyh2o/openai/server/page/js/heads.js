// The map of one layer and head, chosen in a grid of all of them.

import * as api from "./api.js";
import { ask } from "./dialogs.js";
import { button, h } from "./dom.js";
import { count } from "./format.js";
import { careful } from "./live.js";
import { MemoryMap } from "./map.js";
import { paint } from "./paint.js";
import { savePng, saveSvg } from "./picture.js";

/** Shows the grid of a session. */
export async function showHeads(name) {
  const whole = name ? await careful(() => api.map(name)) : null;
  if (!whole) return;
  const view = new Heads(name, whole);
  await ask("Layers and heads", [view.element], "Close", { no: "", wide: true });
  view.isClosed = true;
}

class Heads {
  constructor(name, { layers, heads }) {
    Object.assign(this, { name, layers, heads, isClosed: false });
    this.canvas = h("canvas", { class: "pair-map", width: 640, height: 800, role: "img" });
    this.words = h("p", { role: "status", class: "summary" });
    this.cells = Array.from({ length: layers * heads }, (_, pair) => this.cell(pair));
    const rows = Array.from({ length: layers }, (_, layer) => h("div", { class: "grid-row" },
      h("span", { class: "quiet" }, String(layer)), ...this.cells.slice(layer * heads, (layer + 1) * heads)));
    const save = (work) => () => this.map && work(this.map, `${name} - layer ${this.layer} head ${this.head}`);
    this.element = h("div", { class: "heads" },
      h("div", {},
        h("p", { class: "quiet" }, "A row for each layer, a field for each KV head; arrow keys go around."),
        h("div", { class: "grid", role: "group", "aria-label": "Layer and head", keydown: (event) => this.onKey(event) }, ...rows),
        h("div", { class: "more" }, button("Draw all", () => this.drawAll()),
          button("Save as PNG", save(savePng)), button("Save as SVG", save(saveSvg)))),
      h("div", {}, this.words, this.canvas));
    this.choose(0);
  }

  cell(pair) {
    const [layer, head] = this.pairOf(pair);
    return button(h("canvas", { width: 24, height: 30, "aria-hidden": "true" }), () => this.choose(pair),
      { "aria-label": `Layer ${layer}, head ${head}`, "aria-pressed": "false", tabindex: pair ? -1 : 0 });
  }

  pairOf(pair) {
    return [Math.floor(pair / this.heads), pair % this.heads];
  }

  async fetch(pair) {
    const answer = await careful(() => api.map(this.name, ...this.pairOf(pair)));
    if (!answer) return null;
    const map = new MemoryMap(answer, true);
    paint(this.cells[pair].firstChild, map);
    return map;
  }

  async choose(pair) {
    [this.layer, this.head] = this.pairOf(pair);
    this.cells.forEach((cell, i) => {
      cell.setAttribute("aria-pressed", String(i === pair));
      cell.tabIndex = i === pair ? 0 : -1;
    });
    const map = await this.fetch(pair);
    if (!map || String(this.pairOf(pair)) !== String([this.layer, this.head])) return;
    this.map = map;
    paint(this.canvas, map);
    const held = map.answer.kept.positions.length;
    this.words.textContent = `Layer ${this.layer}, head ${this.head}: ${count(held)} of ${count(map.n)} tokens held.`;
    this.canvas.setAttribute("aria-label", this.words.textContent);
  }

  /** One after the other: the server has other work. */
  async drawAll() {
    for (let pair = 0; pair < this.cells.length && !this.isClosed; pair += 1) await this.fetch(pair);
  }

  onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.heads, ArrowUp: -this.heads }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = this.layer * this.heads + this.head + step;
    if (!this.cells[next]) return;
    this.cells[next].focus();
    this.choose(next);
  }
}
