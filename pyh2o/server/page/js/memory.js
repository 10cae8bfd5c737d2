// The memory panel: the strip, the statistics, the legend, and the recalled passages.

import * as api from "./api.js";
import { announce, button, byId, formatBytes, formatNumber, formatPercent, formatSpeed, h, plural, showToast, throttled } from "./dom.js";
import { MemoryMap, paint, PINNED, showHeads } from "./map.js";
import { followTokens, Pins, Shading } from "./shading.js";
import { browserStorage } from "./storage.js";
import { Tokens } from "./tokens.js";

const IS_SHOWN = "pyh2o-memory";
const REFRESH_MS = 1500; // minimum between two maps during an answer

export class Memory {
  constructor(page) {
    this.page = page;
    this.strip = new Strip((position) => page.view.showPosition(position));
    this.kv = {};
    this.numbers = h("dl", { class: "numbers" });
    this.shading = new Shading(showToast);
    this.pins = new Pins(page, () => this.refresh());
    this.tokenInfo = h("p", { class: "token-info" });
    followTokens((...token) => this.describe(...token),
      (position) => this.pins.togglePin(position, this.map?.states[position] === PINNED));
    this.toggle = button("Memory", () => this.show(!this.isShown), { "aria-controls": "memory" });
    this.shadeButton = button("Shade the text", () => this.setShaded(!this.isShaded), { "aria-pressed": "false" });
    this.summary = h("p", { class: "summary" });
    this.recalled = h("ul", { class: "recalled-list" });
    this.refreshSoon = throttled(() => this.refresh(), REFRESH_MS);
    this.markVisibleSoon = throttled(() => this.markVisible(), 100);
    document.addEventListener("scroll", this.markVisibleSoon, true);
    this.build();
    this.show(hasSpace() && browserStorage.get(IS_SHOWN) === "yes", false);
  }

  build() {
    this.legend = h("ul", { class: "legend", "aria-label": "Tokens" });
    this.statistics = h("details", { class: "statistics" }, h("summary", {}, "Statistics"), this.numbers,
      button("Layers and heads", () => showHeads(this.page.shownId)));
    const details = h("div", { class: "memory-details", tabindex: 0, role: "region", "aria-label": "Details of the memory" },
      h("div", { class: "memory-head" }, h("h2", {}, "Memory"),
        button("×", () => this.show(false), { class: "icon", "aria-label": "Close the memory" })),
      this.summary, this.statistics, this.legend, this.shadeButton, this.tokenInfo,
      h("h3", {}, "Recalled for the last answer"), this.recalled);
    byId("memory").replaceChildren(this.strip.element, details);
  }

  /** Shows or hides the panel; `isChosen` by the user, which the browser remembers. */
  show(isShown, isChosen = true) {
    this.isShown = isShown;
    byId("memory").hidden = !isShown;
    this.toggle.setAttribute("aria-pressed", String(isShown));
    if (isChosen) browserStorage.set(IS_SHOWN, isShown ? "yes" : "no");
    if (isShown) this.refresh();
  }

  /** Opens another session, or the new state of the same one. */
  open(session) {
    const isOther = session?.id !== this.session?.id;
    // A changed text can have the same number of tokens.
    if (session?.changed !== this.session?.changed) this.tokens = null;
    this.session = session;
    this.n = session?.tokens ?? 0;
    if (isOther) {
      this.map = null;
      this.tokens = null;
      this.kv = {};
      this.numbers.replaceChildren();
      this.tokenInfo.textContent = "";
      this.shading.clear();
      this.setShaded(false);
      this.recalled.replaceChildren(h("li", { class: "muted" }, "None."));
      this.strip.set(new MemoryMap({ tokens: 0, pairs: 1, kept: { positions: [], rows: [] } }));
      this.legend.replaceChildren();
      this.summary.textContent = session ? "" : "There is no text yet.";
      if (session) this.showRecalled(session.id);
    }
    this.refreshSoon();
  }

  /** Handles statistics that arrive during an answer. */
  onKv(id, kv) {
    if (id !== this.page.id) return;
    this.showStatistics(kv);
    this.refreshSoon();
  }

  async afterAnswer(id) {
    if (id !== this.page.id) return;
    // Open the panel at the first eviction, unless the user has opened or closed it before.
    if (this.kv.compactions && hasSpace() && browserStorage.get(IS_SHOWN) === null) this.show(true, false);
    await this.refresh();
    await this.showRecalled(id);
  }

  /** Lists the evicted passages that the last answer attended to. */
  async showRecalled(id) {
    const spans = await api.recalled(id).catch(() => []);
    if (id !== this.session?.id) return;
    const items = spans.map(({ start, text, mass }) => h("li", {},
      button(text.trim().slice(0, 160) || "…", () => this.page.view.showPosition(start), { dir: "auto" }),
      h("small", { title: "attention weight in the last answer" }, mass === undefined || mass === null ? "" : `weight ${mass.toPrecision(2)}`)));
    this.recalled.replaceChildren(...(items.length ? items : [h("li", { class: "muted" }, "None.")]));
  }

  /** Fetches and shows the map. */
  async refresh() {
    const { session } = this;
    if (!session || !(this.isShown || this.isShaded)) return;
    const answer = await api.map(session.id).catch(() => null);
    if (!answer || this.session?.id !== session.id) return;
    this.map = new MemoryMap(answer);
    this.n = this.map.n;
    this.strip.set(this.map);
    this.showStatistics(answer.kv);
    this.legend.replaceChildren(...this.map.totals().map(([n, { id, label }]) =>
      h("li", {}, h("span", { class: `swatch token ${id} s4`, "aria-hidden": "true" }), h("span", {}, label), h("b", {}, formatNumber(n)))));
    this.strip.canvas.setAttribute("aria-hidden", "true"); // the legend has the same content
    this.shade();
    this.markVisibleSoon();
  }

  /** Updates the statistics that are given. */
  showStatistics(kv) {
    this.kv = { ...this.kv, ...kv };
    this.summary.textContent = summaryOf(this.kv, this.n);
    const rows = statisticsOf(this.kv).filter(([, value]) => value !== null);
    this.numbers.replaceChildren(...rows.flatMap(([name, value, title]) => [h("dt", { title }, name), h("dd", {}, value)]));
  }

  describe(position, text, hasFocus) {
    this.tokenInfo.textContent = this.map?.describe(position, text) ?? "";
    if (hasFocus) announce(this.tokenInfo.textContent);
  }

  markVisible() {
    if (this.map?.n && this.isShown) this.strip.showSpan(this.page.view.visibleSpan(this.map.n));
  }

  /** The session's tokens, up to the number in the session or the newest map (none is fetched while the panel is hidden). */
  currentTokens() {
    this.tokens ??= new Tokens(this.session.id);
    this.tokens.update(this.n);
    return this.tokens;
  }

  async setShaded(isShaded) {
    this.isShaded = isShaded;
    this.shadeButton.setAttribute("aria-pressed", String(isShaded));
    if (isShaded) await this.refresh();
    else this.shading.clear();
  }

  shade() {
    if (this.isShaded) this.shading.show(this.page.view.shadableParts(), this.map, this.currentTokens());
  }
}

/** Whether the panel fits next to the text. */
const hasSpace = () => matchMedia("(min-width: 70rem)").matches;

// The last tokens of an answer are read with the next message; the summary ignores up to this many.
const FEW = 8;

/** Summarises the cache for people who don't know how it works. */
function summaryOf(kv, n) {
  const unread = n - kv.position > FEW ? `${plural(n - kv.position, "token")} not read yet.` : "";
  if (!kv.position) return unread || "There is no text yet.";
  const rest = kv.bytes_archive ? "in the archive and retrieved when needed" : "lost";
  const kept = kv.compactions ? `${formatNumber(kv.used)} of ${plural(kv.position, "token")} are in the cache; the rest is ${rest}.`
    : `All ${plural(kv.position, "token")} are in the cache: nothing was evicted yet.`;
  return [kept, unread].join(" ").trim();
}

/** The statistics as [name, value, explanation]; unknown values are null. */
function statisticsOf(kv) {
  const known = (value, format) => (value || value === 0 ? format(value) : null);
  return [
    ["Tokens read", known(kv.position, formatNumber)],
    ["In the cache", known(kv.used, (n) => `${formatNumber(n)} of ${formatNumber(kv.capacity)}`), "tokens in the cache, and its capacity"],
    ["Cache memory", known(kv.bytes, formatBytes), "memory of the cache, which does not grow"],
    ["Full cache", known(kv.bytes_full, formatBytes), "memory of a cache without eviction for the same window"],
    ["Archive", known(kv.bytes_archive || null, formatBytes), "size of the evicted rows; grows with the text"],
    ["Compactions", known(kv.compactions, formatNumber), "how often tokens were evicted"],
    ["Retrieved", known(kv.found_share, formatPercent), "fraction of attention on rows retrieved from the archive"],
    ["Speed", known(kv.tokens_per_second, formatSpeed)],
    ["First token", known(kv.first_token_seconds, (n) => `after ${n.toFixed(2)} s`)],
  ];
}

/** The strip next to the text: an overview of the whole text, and a scroll bar for it. */
class Strip {
  constructor(go) {
    this.go = go;
    this.span = [0, 0];
    this.canvas = h("canvas", { class: "map" });
    this.viewport = h("div", { class: "viewport" });
    this.element = h("div", {
      class: "strip", role: "slider", tabindex: 0, "aria-orientation": "vertical", "aria-label": "Position in the text",
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0,
      click: (event) => this.onClick(event), keydown: (event) => this.onKey(event),
    }, this.canvas, this.viewport);
    new ResizeObserver(() => this.paint()).observe(this.element);
  }

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

  /** Marks the visible part of the text. */
  showSpan(span) {
    this.span = span;
    if (!this.shape) return;
    const line = this.shape.pixels / devicePixelRatio;
    const [from, to] = span.map((position) => Math.floor(position / this.shape.perLine));
    this.viewport.style.top = `${from * line}px`;
    this.viewport.style.height = `${Math.max(3, (to - from + 1) * line)}px`;
    const now = Math.min(this.map.n, Math.round(span[0]));
    this.element.setAttribute("aria-valuenow", now);
    this.element.setAttribute("aria-valuetext", `token ${formatNumber(now)} of ${formatNumber(this.map.n)}, ${this.map.stateName(now)}`);
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
