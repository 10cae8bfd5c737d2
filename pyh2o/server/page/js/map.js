// The memory map of a text: what the cache has of each token, drawn, and by layer and head.

import * as api from "./api.js";
import { ask, careful, count, h } from "./dom.js";

// What a token is, from the least to what is shown where several hold.
const LOST = 0, ARCHIVED = 1, HELD = 2, RECENT = 3, RECALLED = 5;
export const PINNED = 4, UNREAD = 6;

/** Colours of Okabe and Ito, which those who see few colours can tell apart; and the words for them. */
export const STATES = [
  { id: "lost", colour: [128, 128, 128], words: "Forgotten" },
  { id: "archived", colour: [0, 158, 115], words: "Only in the archive" },
  { id: "held", colour: [0, 114, 178], words: "Kept by some heads: the stronger, the more of them" },
  { id: "recent", colour: [86, 180, 233], words: "Recent: kept by all" },
  { id: "pinned", colour: [230, 159, 0], words: "Pinned: stays" },
  { id: "recalled", colour: [204, 121, 167], words: "Came back: the last answer looked at it" },
  { id: "unread", colour: [0, 0, 0], words: "Not read yet" },
];

const FULL = 255;
const FAINT = 0.15; // of what is forgotten, on light and on dark paper

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

  /** How many tokens are in each state that occurs, with that. */
  totals() {
    const totals = new Array(STATES.length).fill(0);
    for (let i = 0; i < this.n; i += 1) totals[this.states[i]] += 1;
    return STATES.map((state, i) => [totals[i], state]).filter(([n]) => n).reverse();
  }

  /** The state of a token in words. */
  words(position) {
    return STATES[this.states[position] ?? LOST].words.split(":")[0].toLowerCase();
  }

  /** A token in words. */
  describe(position, text) {
    const { positions, rows, scores } = this.answer.kept;
    const i = positions.indexOf(position);
    const held = i < 0 ? "No layer and head holds it."
      : `Held by ${count(rows[i])} of ${count(this.pairs)} pairs of layer and head, score ${scores[i].toPrecision(3)}.`;
    return `Token ${count(position)}: ${JSON.stringify(text)}, ${this.words(position)}. ${held}`;
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

/** A picture of the map, a pixel for each token, which is as opaque as it is strongly shown. */
function pixelsOf(map, perLine, lines) {
  const image = new ImageData(perLine, Math.max(1, lines));
  const pixels = new Uint32Array(image.data.buffer);
  const colours = STATES.map(({ colour: [r, g, b] }) => (b << 16) | (g << 8) | r);
  for (let i = 0; i < map.n; i += 1) {
    const state = map.states[i];
    const strength = state === LOST ? FAINT : map.strength(i);
    pixels[i] = (Math.round(FULL * strength) << 24) | colours[state];
  }
  return image;
}

/** Draws a map onto a canvas, whose size is in device pixels. */
export function paint(canvas, map) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!map.n) return null;
  const shape = layout(map.n, canvas.width, canvas.height);
  const small = new OffscreenCanvas(shape.perLine, shape.lines);
  small.getContext("2d").putImageData(pixelsOf(map, shape.perLine, shape.lines), 0, 0);
  context.imageSmoothingEnabled = shape.perLine > canvas.width;
  context.drawImage(small, 0, 0, canvas.width, shape.lines * shape.pixels);
  return shape;
}

/** Shows the map of one layer and head of a session, and lets others be chosen. */
export async function showHeads(name) {
  const whole = name ? await careful(() => api.map(name)) : null;
  if (!whole) return;
  const canvas = h("canvas", { class: "pair-map", width: 640, height: 800, role: "img" });
  const words = h("p", { role: "status", class: "summary" });
  const chooser = (what, n) => h("select", { "aria-label": what, change: () => show() },
    ...Array.from({ length: n }, (_, i) => h("option", { value: i }, `${what} ${i}`)));
  const choosers = [chooser("Layer", whole.layers), chooser("Head", whole.heads)];
  const chosen = () => choosers.map(({ value }) => value);
  const show = async () => {
    const [layer, head] = chosen();
    const answer = await careful(() => api.map(name, layer, head));
    if (!answer || String(chosen()) !== String([layer, head])) return;
    const map = new MemoryMap(answer, true);
    paint(canvas, map);
    const held = map.answer.kept.positions.length;
    words.textContent = `Layer ${layer}, head ${head}: ${count(held)} of ${count(map.n)} tokens held.`;
    canvas.setAttribute("aria-label", words.textContent);
  };
  show();
  await ask("Layers and heads", [h("div", { class: "heads" }, ...choosers), words, canvas], "Close", { no: "", wide: true });
}
