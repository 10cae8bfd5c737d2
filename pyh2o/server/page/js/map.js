// The memory map of a text: what the cache has of each token, drawn, as a file, and by layer and head.

import * as api from "./api.js";
import { ask, button, careful, count, counted, h, percent, save } from "./dom.js";

// What a token is, from the least to what is shown where several hold.
const LOST = 0, ARCHIVED = 1, HELD = 2, RECENT = 3, RECALLED = 5;
export const PINNED = 4, UNREAD = 6;

/** Colours of Okabe and Ito, which those who see few colours can tell apart; and the words for them. */
export const STATES = [
  { id: "lost", colour: null, words: "Forgotten" },
  { id: "archived", colour: [0, 158, 115], words: "Only in the archive" },
  { id: "held", colour: [0, 114, 178], words: "Held by some heads: the stronger, the more of them" },
  { id: "recent", colour: [86, 180, 233], words: "Recent: held by all" },
  { id: "pinned", colour: [230, 159, 0], words: "Pinned: stays" },
  { id: "recalled", colour: [204, 121, 167], words: "Recalled: the last answer looked at it" },
  { id: "unread", colour: null, words: "Not read yet" },
];

const FULL = 255;
// An answer's last tokens are read with the next message: of so few nothing is said.
const FEW = 8;

export class MemoryMap {
  /** `answer` is that of the map's route; `isPair`: of one layer and head. */
  constructor(answer, isPair = false) {
    const { tokens, pairs, kept } = answer;
    this.answer = answer;
    this.n = tokens;
    this.pairs = isPair ? 1 : Math.max(1, pairs);
    this.states = new Uint8Array(tokens);
    this.shares = new Uint8Array(tokens); // 0 to 255: of the pairs that hold it
    this.fill(answer.archived, ARCHIVED);
    kept.positions.forEach((position, i) => {
      if (position >= tokens) return;
      this.shares[position] = Math.round(FULL * Math.min(1, kept.rows[i] / this.pairs));
      this.states[position] = position >= answer.recent_from ? RECENT : HELD;
    });
    this.fill(answer.recalled, RECALLED);
    this.fill(answer.pinned, PINNED);
    this.states.fill(UNREAD, answer.kv?.position ?? tokens);
  }

  fill(spans, state) {
    for (const [start, end] of spans ?? []) this.states.fill(state, start, end);
  }

  /** How strongly a token is shown, 0 to 1: what is held by few is still seen. */
  strength(position) {
    const state = this.states[position];
    if (state === LOST || state === UNREAD) return 0;
    if (state === ARCHIVED) return 0.35;
    if (state === PINNED || state === RECALLED) return 1;
    return 0.3 + 0.7 * this.shares[position] / FULL;
  }

  /** The map in a sentence. */
  summary() {
    if (!this.n) return "There is no text yet.";
    const totals = new Array(STATES.length).fill(0);
    for (let i = 0; i < this.n; i += 1) totals[this.states[i]] += 1;
    const unread = totals[UNREAD] > FEW ? totals[UNREAD] : 0;
    const read = this.n - unread;
    const still = unread ? ` ${counted(unread, "token")} still to be read.` : "";
    if (!read) return still.trim();
    const held = this.answer.kept.positions.length;
    const words = ["forgotten", "only in the archive", "held by some heads", "recent", "pinned", "recalled"];
    const parts = words.map((what, state) => [totals[state], what]).filter(([n]) => n)
      .reverse().map(([n, what]) => `${count(n)} ${what}`);
    return `Of ${counted(read, "token")} the cache holds ${count(held)} (${percent(held / read)}) somewhere: ${parts.join(", ")}.${still}`;
  }

  /** A token in words. */
  words(position) {
    return STATES[this.states[position] ?? LOST].words.split(":")[0].toLowerCase();
  }
}

// The memory map as a picture: lines of tokens, a dot each, scaled up to the room there is.

const LINE_PIXELS = [10, 8, 6, 4, 3, 2];
const LEAST_WIDTH = 2; // pixels of a token, where there is room

/** How tokens are laid out: `perLine` beside each other, lines of `pixels`. */
function layout(n, width, height) {
  const beside = (pixels) => Math.max(1, Math.ceil(n / Math.max(1, Math.floor(height / pixels))));
  const pixels = LINE_PIXELS.find((some) => beside(some) * LEAST_WIDTH <= width) ?? 1;
  const perLine = beside(pixels);
  return { perLine, lines: Math.ceil(n / perLine), pixels };
}

/** The colours of the strengths of each state, over the paper: 16 steps, as numbers of ImageData. */
function palette(isDark) {
  const paper = isDark ? [31, 34, 38] : [243, 242, 238];
  const lost = isDark ? [42, 46, 51] : [226, 224, 218];
  const plain = (state) => (state === UNREAD ? paper : lost);
  const colours = new Uint32Array(STATES.length * 16);
  STATES.forEach(({ colour }, state) => {
    for (let step = 0; step < 16; step += 1) {
      const [r, g, b] = [0, 1, 2].map((i) =>
        Math.round(colour ? paper[i] + (colour[i] - paper[i]) * step / 15 : plain(state)[i]));
      colours[state * 16 + step] = 0xff000000 | (b << 16) | (g << 8) | r;
    }
  });
  return colours;
}

/** A picture of the map, a pixel for each token. */
function pixelsOf(map, perLine, lines, isDark) {
  const image = new ImageData(perLine, Math.max(1, lines));
  const pixels = new Uint32Array(image.data.buffer);
  const colours = palette(isDark);
  for (let i = 0; i < map.n; i += 1) {
    pixels[i] = colours[map.states[i] * 16 + Math.round(15 * map.strength(i))];
  }
  return image;
}

/** Draws a map onto a canvas, whose size is in device pixels. */
export function paint(canvas, map, isDark = matchMedia("(prefers-color-scheme: dark)").matches) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!map.n) return null;
  const shape = layout(map.n, canvas.width, canvas.height);
  const small = new OffscreenCanvas(shape.perLine, shape.lines);
  small.getContext("2d").putImageData(pixelsOf(map, shape.perLine, shape.lines, isDark), 0, 0);
  context.imageSmoothingEnabled = shape.perLine > canvas.width;
  context.drawImage(small, 0, 0, canvas.width, shape.lines * shape.pixels);
  return shape;
}

// The map as a file, with its legend: PNG and SVG.

const WIDTH = 600, HEIGHT = 800, LEGEND = 26;

const hex = (pixel) => `#${[0, 8, 16].map((shift) => ((pixel >> shift) & 255).toString(16).padStart(2, "0")).join("")}`;
const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const legend = () => STATES.filter(({ colour }) => colour);

/** Saves the map as a PNG. */
export async function savePng(map, title) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [WIDTH, HEIGHT];
  paint(canvas, map, false);
  const whole = document.createElement("canvas");
  [whole.width, whole.height] = [WIDTH + 40, HEIGHT + 70 + LEGEND * legend().length];
  const context = whole.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, whole.width, whole.height);
  context.drawImage(canvas, 20, 50);
  context.font = "16px sans-serif";
  context.fillStyle = "#1d1f23";
  context.fillText(title, 20, 32, WIDTH);
  legend().forEach(({ colour, words }, i) => {
    const y = HEIGHT + 62 + LEGEND * i;
    context.fillStyle = `rgb(${colour.join()})`;
    context.fillRect(20, y, 16, 16);
    context.fillStyle = "#1d1f23";
    context.fillText(words, 44, y + 14);
  });
  save(await new Promise((resolve) => whole.toBlob(resolve)), `${title}.png`);
}

/** Saves the map as an SVG: neighbours of one colour are one rectangle. */
export function saveSvg(map, title) {
  const { perLine, lines, pixels } = layout(map.n, WIDTH, HEIGHT);
  const image = new Uint32Array(pixelsOf(map, perLine, lines, false).data.buffer);
  const width = WIDTH / perLine;
  const parts = [];
  for (let line = 0; line < lines; line += 1) {
    const end = Math.min(map.n, (line + 1) * perLine);
    for (let at = line * perLine; at < end;) {
      let next = at + 1;
      while (next < end && image[next] === image[at]) next += 1;
      const x = (at - line * perLine) * width;
      parts.push(`<rect x="${x.toFixed(2)}" y="${line * pixels}" width="${((next - at) * width).toFixed(2)}" height="${pixels}" fill="${hex(image[at])}"/>`);
      at = next;
    }
  }
  const words = legend().map(({ colour, words: text }, i) =>
    `<rect y="${HEIGHT + 12 + LEGEND * i}" width="16" height="16" fill="rgb(${colour.join()})"/>`
    + `<text x="24" y="${HEIGHT + 26 + LEGEND * i}">${escaped(text)}</text>`);
  const height = HEIGHT + 70 + LEGEND * legend().length;
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="-20 -50 ${WIDTH + 40} ${height}" font-family="sans-serif" font-size="16" shape-rendering="crispEdges">`
    + `<title>${escaped(title)}</title><rect x="-20" y="-50" width="${WIDTH + 40}" height="${height}" fill="#fff"/>`
    + `<text y="-18">${escaped(title)}</text>${parts.join("")}${words.join("")}</svg>`;
  save(new Blob([svg], { type: "image/svg+xml" }), `${title}.svg`);
}

// The map of one layer and head, chosen in a grid of all of them.

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
