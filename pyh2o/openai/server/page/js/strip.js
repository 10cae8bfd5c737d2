// The strip beside the text: the whole text at a glance, and a way to each place of it.

import { h } from "./dom.js";
import { count } from "./format.js";
import { paint } from "./paint.js";

export class Strip {
  /** @param {(position: number) => void} go */
  constructor(go) {
    this.go = go;
    this.span = [0, 0];
    this.canvas = h("canvas", { class: "map" });
    this.mark = h("div", { class: "mark" });
    this.element = h("div", {
      class: "strip", role: "slider", tabindex: 0, "aria-orientation": "vertical", "aria-label": "Place in the text",
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0,
      click: (event) => this.onClick(event), keydown: (event) => this.onKey(event),
    }, this.canvas, this.mark);
    new ResizeObserver(() => this.paint()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  /** Shows a map. */
  set(map) {
    this.map = map;
    this.paint();
  }

  paint() {
    const { clientWidth, clientHeight } = this.element;
    if (!this.map || !clientWidth || !clientHeight) return;
    const width = Math.round(clientWidth * devicePixelRatio);
    const height = Math.round(clientHeight * devicePixelRatio);
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const begun = performance.now();
    this.shape = paint(this.canvas, this.map);
    // For measurements of the page; nothing reads it here.
    this.element.dataset.ms = (performance.now() - begun).toFixed(1);
    this.element.setAttribute("aria-valuemax", Math.max(0, this.map.n - 1));
    this.showSpan(this.span);
  }

  /** Marks what is in sight of the text. */
  showSpan(span) {
    this.span = span;
    if (!this.shape) return;
    const line = this.shape.pixels / devicePixelRatio;
    const [from, to] = span.map((position) => Math.floor(position / this.shape.perLine));
    this.mark.style.top = `${from * line}px`;
    this.mark.style.height = `${Math.max(3, (to - from + 1) * line)}px`;
    const now = Math.min(this.map.n, Math.round(span[0]));
    this.element.setAttribute("aria-valuenow", now);
    this.element.setAttribute("aria-valuetext", `token ${count(now)} of ${count(this.map.n)}, ${this.map.words(now)}`);
  }

  onClick({ clientX, clientY }) {
    if (!this.shape) return;
    const { left, top, width } = this.element.getBoundingClientRect();
    const line = Math.floor((clientY - top) * devicePixelRatio / this.shape.pixels);
    const inLine = Math.floor((clientX - left) / width * this.shape.perLine);
    this.go(Math.max(0, Math.min(this.map.n - 1, line * this.shape.perLine + inLine)));
  }

  onKey(event) {
    if (!this.map) return;
    const page = Math.max(1, this.span[1] - this.span[0]);
    const steps = { ArrowUp: -page / 4, ArrowDown: page / 4, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const middle = (this.span[0] + this.span[1]) / 2;
    this.go(Math.round(Math.max(0, Math.min(this.map.n - 1, middle + steps[event.key]))));
  }
}
