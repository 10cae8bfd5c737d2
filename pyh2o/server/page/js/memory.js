// The memory beside the text: the strip, its legend, the figures, and what was recalled.

import * as api from "./api.js";
import { announce, button, byId, bytes, complain, count, counted, h, percent, speed, throttled } from "./dom.js";
import { MemoryMap, paint, PINNED, showHeads, STATES } from "./map.js";
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
    this.show(hasRoom() && ofBrowser.get(SHOWN) === "yes", false);
  }

  build() {
    this.legend = h("ul", { class: "legend", "aria-label": "Tokens" });
    this.figures = h("details", { class: "figures" }, h("summary", {}, "Figures"), this.numbers,
      button("Layers and heads", () => showHeads(this.page.viewed)));
    const about = h("div", { class: "about", tabindex: 0, role: "region", "aria-label": "About the memory" },
      h("div", { class: "memory-head" }, h("h2", {}, "Memory"),
        button("×", () => this.show(false), { class: "icon", "aria-label": "Close the memory" })),
      this.summary, this.figures, this.legend, this.shadeButton, this.token,
      h("h3", {}, "Came back for this answer"), this.recalled);
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
      this.legend.replaceChildren();
      this.summary.textContent = session ? "" : "There is no text yet.";
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
    // There is something to see: who has not chosen yet gets to see it.
    if (this.kv.compactions && hasRoom() && ofBrowser.get(SHOWN) === null) this.show(true, false);
    await this.refresh();
    await this.showRecalled(name);
  }

  /** Lists what came back for the last answer of a session. */
  async showRecalled(name) {
    const spans = await api.recalled(name).catch(() => []);
    if (name !== this.session?.name) return;
    const items = spans.map(({ start, text, mass }) => h("li", {},
      button(text.trim().slice(0, 160) || "…", () => this.page.view.showPosition(start), { dir: "auto" }),
      h("small", { title: "how much attention the answer paid to it" }, mass === undefined || mass === null ? "" : `weight ${mass.toPrecision(2)}`)));
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
    this.legend.replaceChildren(...this.map.totals().map(([n, { id, words }]) =>
      h("li", {}, h("span", { class: `swatch t ${id} s4`, "aria-hidden": "true" }), h("span", {}, words), h("b", {}, count(n)))));
    this.strip.canvas.setAttribute("aria-hidden", "true"); // the legend says it
    this.shade();
    this.follow();
  }

  /** Shows figures; those that did not come stay as they were. */
  tell(kv) {
    this.kv = { ...this.kv, ...kv };
    this.summary.textContent = sentence(this.kv, this.n);
    const rows = figures(this.kv).filter(([, value]) => value !== null);
    this.numbers.replaceChildren(...rows.flatMap(([name, value, title]) => [h("dt", { title }, name), h("dd", {}, value)]));
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

/** Whether the memory fits beside the text. */
const hasRoom = () => matchMedia("(min-width: 70rem)").matches;

// An answer's last tokens are read with the next message: of so few nothing is said.
const FEW = 8;

/** What the memory is, for somebody who knows nothing of caches. */
function sentence(kv, n) {
  const unread = n - kv.position > FEW ? `${counted(n - kv.position, "token")} still to be read.` : "";
  if (!kv.position) return unread || "There is no text yet.";
  const rest = kv.bytes_archive ? "is in the archive and comes back when it is asked for" : "is forgotten";
  const kept = kv.compactions ? `Keeps ${count(kv.used)} of ${counted(kv.position, "token")} at hand; the rest ${rest}.`
    : `All ${counted(kv.position, "token")} are at hand: nothing had to go yet.`;
  return [kept, unread].join(" ").trim();
}

/** The figures of a session in words, with what they mean; null for what is not known. */
function figures(kv) {
  const given = (value, words) => (value || value === 0 ? words(value) : null);
  return [
    ["Text read", given(kv.position, (n) => counted(n, "token"))],
    ["At hand", given(kv.used, (n) => `${count(n)} of ${count(kv.capacity)}`), "tokens in the cache, and how many it has room for"],
    ["Memory", given(kv.bytes, bytes), "of the cache, which does not grow"],
    ["A usual cache", given(kv.bytes_full, bytes), "one that keeps everything, for the same window"],
    ["Archive", given(kv.bytes_archive || null, bytes), "of what left the cache; it grows with the text"],
    ["Room made", given(kv.compactions, (n) => counted(n, "time")), "compactions: how often tokens had to leave the cache"],
    ["From the archive", given(kv.found_share, percent), "share of attention that went to tokens found there"],
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
