// The memory beside the text: the strip, its legend, the figures, and what was recalled.

import * as api from "./api.js";
import { announce, button, byId, bytes, complain, count, h, percent, speed, throttled } from "./dom.js";
import { MemoryMap, paint, PINNED, showHeads, STATES, UNREAD } from "./map.js";
import { followTokens, Pins, Shading } from "./shade.js";
import { ofBrowser } from "./storage.js";
import { Tokens } from "./tokens.js";

const SHOWN = "pyh2o-memory";
const REFRESH_MS = 1500; // while an answer is made, a map is asked for so often at most

export class Memory {
  constructor(page) {
    this.page = page;
    this.strip = new Strip((position) => page.view.showPosition(position));
    this.kv = {};
    this.numbers = h("dl", { class: "numbers" });
    this.shading = new Shading(complain);
    this.pins = new Pins(page, () => this.refresh());
    this.token = h("p", { class: "token" });
    followTokens((...token) => this.describe(...token),
      (position) => this.pins.togglePin(position, this.map?.states[position] === PINNED));
    this.toggle = button("Memory", () => this.show(!this.isShown), { "aria-controls": "memory" });
    this.shadeButton = button("Shade the text", () => this.setShaded(!this.isShaded), { "aria-pressed": "false" });
    this.summary = h("p", { class: "summary" });
    this.recalled = h("ul", { class: "recalled-list" });
    this.soon = throttled(() => this.refresh(), REFRESH_MS);
    this.follow = throttled(() => this.markSight(), 100);
    document.addEventListener("scroll", this.follow, true);
    this.build();
    // A phone has no room for it beside the text.
    const isWide = matchMedia("(min-width: 70rem)").matches;
    this.show(isWide && ofBrowser.get(SHOWN) !== "no", false);
  }

  build() {
    const legend = h("ul", { class: "legend" }, ...STATES.slice(0, UNREAD).map(({ id, words }) =>
      h("li", {}, h("span", { class: `swatch t ${id} s4`, "aria-hidden": "true" }), words)));
    const about = h("div", { class: "about", tabindex: 0, role: "region", "aria-label": "About the memory" },
      h("div", { class: "memory-head" }, h("h2", {}, "Memory"),
        button("×", () => this.show(false), { class: "icon", "aria-label": "Close the memory" })),
      this.summary, this.shadeButton, legend, this.token,
      h("h3", {}, "Figures"), this.numbers,
      h("h3", {}, "Remembered for this answer"), this.recalled,
      h("h3", {}, "More"), button("Layers and heads", () => showHeads(this.page.viewed)));
    byId("memory").replaceChildren(this.strip.element, about);
  }

  /** Shows or hides the panel. */
  show(isShown, isChosen = true) {
    this.isShown = isShown;
    byId("memory").hidden = !isShown;
    this.toggle.setAttribute("aria-pressed", String(isShown));
    if (isChosen) ofBrowser.set(SHOWN, isShown ? "yes" : "no");
    if (isShown) this.refresh();
  }

  /** Another session is on the page, or the same one as it is now. */
  open(session) {
    const isOther = session?.name !== this.session?.name;
    // Another text may have as many tokens.
    if (session?.changed !== this.session?.changed) this.tokens = null;
    this.session = session;
    this.n = session?.tokens ?? 0;
    if (isOther) {
      this.map = null;
      this.tokens = null;
      this.kv = {};
      this.numbers.replaceChildren();
      this.token.textContent = "";
      this.shading.clear();
      this.setShaded(false);
      this.recalled.replaceChildren(h("li", { class: "quiet" }, "Nothing."));
      this.strip.set(new MemoryMap({ tokens: 0, pairs: 1, kept: { positions: [], rows: [] } }));
      this.summary.textContent = "There is no text yet.";
      if (session) this.showRecalled(session.name);
    }
    this.soon();
  }

  /** Figures came while an answer is made. */
  onKv(name, kv) {
    if (name !== this.page.name) return;
    this.tell(kv);
    this.soon();
  }

  async afterAnswer(name) {
    if (name !== this.page.name) return;
    await this.refresh();
    await this.showRecalled(name);
  }

  /** Lists what came back for the last answer of a session. */
  async showRecalled(name) {
    const spans = await api.recalled(name).catch(() => []);
    if (name !== this.session?.name) return;
    const items = spans.map(({ start, text, mass }) => h("li", {},
      button(text.trim().slice(0, 160) || "…", () => this.page.view.showPosition(start), { dir: "auto" }),
      h("small", {}, mass === undefined || mass === null ? "" : `looked at with ${mass.toPrecision(2)}`)));
    this.recalled.replaceChildren(...(items.length ? items : [h("li", { class: "quiet" }, "Nothing.")]));
  }

  /** Asks for the map and shows it. */
  async refresh() {
    const { session } = this;
    if (!session || !(this.isShown || this.isShaded)) return;
    const answer = await api.map(session.name).catch(() => null);
    if (!answer || this.session?.name !== session.name) return;
    this.map = new MemoryMap(answer);
    this.n = this.map.n;
    this.strip.set(this.map);
    this.tell(answer.kv);
    this.summary.textContent = this.map.summary();
    this.strip.canvas.setAttribute("aria-hidden", "true"); // the summary says it
    this.shade();
    this.follow();
  }

  /** Shows figures; those that did not come stay as they were. */
  tell(kv) {
    this.kv = { ...this.kv, ...kv };
    const rows = figures(this.kv).filter(([, value]) => value !== null);
    this.numbers.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  describe(position, text, hasFocus) {
    this.token.textContent = this.map?.describe(position, text) ?? "";
    if (hasFocus) announce(this.token.textContent);
  }

  markSight() {
    if (this.map?.n && this.isShown) this.strip.showSpan(this.page.view.visibleSpan(this.map.n));
  }

  /** The tokens of the session, as many as it said, or the map since: there is none while the memory is hidden. */
  tokensNow() {
    this.tokens ??= new Tokens(this.session.name);
    this.tokens.follow(this.n);
    return this.tokens;
  }

  async setShaded(isShaded) {
    this.isShaded = isShaded;
    this.shadeButton.setAttribute("aria-pressed", String(isShaded));
    if (isShaded) await this.refresh();
    else this.shading.clear();
  }

  shade() {
    if (this.isShaded) this.shading.show(this.page.view.shadable(), this.map, this.tokensNow());
  }
}

/** The figures of a session in words; null for what is not known. */
function figures(kv) {
  const given = (value, words) => (value || value === 0 ? words(value) : null);
  return [
    ["Text", given(kv.position, (n) => `${count(n)} tokens`)],
    ["Cache", given(kv.used, (n) => `${count(n)} of ${count(kv.capacity)} cells`)],
    ["Memory", given(kv.bytes, (n) => `${bytes(n)}, full cache ${bytes(kv.bytes_full)}`)],
    ["Archive", given(kv.bytes_archive || null, bytes)],
    ["Compactions", given(kv.compactions, count)],
    ["Attention found", given(kv.found_share, percent)],
    ["Speed", given(kv.tokens_per_second, speed)],
    ["First token", given(kv.first_token_seconds, (n) => `after ${n.toFixed(2)} s`)],
  ];
}

// The strip beside the text: the whole text at a glance, and a way to each place of it.

class Strip {
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
    this.shape = paint(this.canvas, this.map);
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
