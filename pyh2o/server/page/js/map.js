// The memory map of a text: the state of each token in the cache, as a picture, and per layer and head.

import * as api from "./api.js";
import { ask, formatNumber, h, reportErrors } from "./dom.js";

// States of tokens; where several apply, the highest of 0 to 5 is shown.
const LOST = 0, ARCHIVED = 1, HELD = 2, RECENT = 3, RECALLED = 5;
export const PINNED = 4, UNREAD = 6;

/** Okabe and Ito's colours, which colour-blind people can distinguish, and the legend. */
export const STATES = [
  { id: "lost", colour: [128, 128, 128], label: "Lost: in neither cache nor archive" },
  { id: "archived", colour: [0, 158, 115], label: "Only in the archive" },
  { id: "held", colour: [0, 114, 178], label: "Held by some heads: stronger if by more" },
  { id: "recent", colour: [86, 180, 233], label: "Recent: held by all heads" },
  { id: "pinned", colour: [230, 159, 0], label: "Pinned: never evicted" },
  { id: "recalled", colour: [204, 121, 167], label: "Recalled: the last answer attended to it" },
  { id: "unread", colour: [0, 0, 0], label: "Not read yet" },
];

const OPAQUE = 255;
const LOST_OPACITY = 0.15; // visible on light and dark backgrounds

export class MemoryMap {
  /** `answer` is the response of the map's route; `isPair`: for one layer and head only. */
  constructor(answer, isPair = false) {
    const { tokens, pairs, kept } = answer;
    this.answer = answer;
    this.n = tokens;
    this.pairs = isPair ? 1 : Math.max(1, pairs);
    this.states = new Uint8Array(tokens);
    this.shares = new Uint8Array(tokens); // 0 to 255: fraction of the pairs that hold it
    this.fill(answer.archived, ARCHIVED);
    kept.positions.forEach((position, i) => {
      if (position >= tokens) return;
      this.shares[position] = Math.round(OPAQUE * Math.min(1, kept.rows[i] / this.pairs));
      this.states[position] = position >= answer.recent_from ? RECENT : HELD;
    });
    this.fill(answer.recalled, RECALLED);
    this.fill(answer.pinned, PINNED);
    this.states.fill(UNREAD, answer.kv?.position ?? tokens);
  }

  fill(spans, state) {
    for (const [start, end] of spans ?? []) this.states.fill(state, start, end);
  }

  /** The strength of a token's colour, 0 to 1; tokens that few pairs hold stay visible. */
  strength(position) {
    const state = this.states[position];
    if (state === LOST || state === UNREAD) return 0;
    if (state === ARCHIVED) return 0.35;
    if (state === PINNED || state === RECALLED) return 1;
    return 0.3 + 0.7 * this.shares[position] / OPAQUE;
  }

  /** The number of tokens in each state that occurs: [number, state]. */
  totals() {
    const totals = new Array(STATES.length).fill(0);
    for (let i = 0; i < this.n; i += 1) totals[this.states[i]] += 1;
    return STATES.map((state, i) => [totals[i], state]).filter(([n]) => n).reverse();
  }

  /** The name of a token's state. */
  stateName(position) {
    return STATES[this.states[position] ?? LOST].label.split(":")[0].toLowerCase();
  }

  describe(position, text) {
    const { positions, rows, scores } = this.answer.kept;
    const i = positions.indexOf(position);
    const held = i < 0 ? "Held by no layer and head."
      : `Held by ${formatNumber(rows[i])} of ${formatNumber(this.pairs)} pairs of layer and head, score ${scores[i].toPrecision(3)}.`;
    return `Token ${formatNumber(position)}: ${JSON.stringify(text)}, ${this.stateName(position)}. ${held}`;
  }
}

// The map as a picture: lines of tokens, one pixel each, scaled up to the available size.

const LINE_PIXELS = [10, 8, 6, 4, 3, 2];
const MIN_WIDTH = 2; // pixels of a token, if there is enough space

/** Chooses the height of a line in pixels and the tokens per line. */
function layout(n, width, height) {
  const tokensPerLine = (pixels) => Math.max(1, Math.ceil(n / Math.max(1, Math.floor(height / pixels))));
  const pixels = LINE_PIXELS.find((some) => tokensPerLine(some) * MIN_WIDTH <= width) ?? 1;
  const perLine = tokensPerLine(pixels);
  return { perLine, lines: Math.ceil(n / perLine), pixels };
}

/** An image of the map with one pixel per token; the strength is its opacity. */
function pixelsOf(map, perLine, lines) {
  const image = new ImageData(perLine, Math.max(1, lines));
  const pixels = new Uint32Array(image.data.buffer);
  const colours = STATES.map(({ colour: [r, g, b] }) => (b << 16) | (g << 8) | r);
  for (let i = 0; i < map.n; i += 1) {
    const state = map.states[i];
    const strength = state === LOST ? LOST_OPACITY : map.strength(i);
    pixels[i] = (Math.round(OPAQUE * strength) << 24) | colours[state];
  }
  return image;
}

/** Paints a map on a canvas, whose size is in device pixels, and returns the layout. */
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

/** Opens a dialog with the map of one layer and head of a session. */
export async function showHeads(id) {
  const whole = id ? await reportErrors(() => api.map(id)) : null;
  if (!whole) return;
  const canvas = h("canvas", { class: "head-map", width: 640, height: 800, role: "img" });
  const summary = h("p", { role: "status", class: "summary" });
  const selector = (label, n) => h("select", { "aria-label": label, change: () => show() },
    ...Array.from({ length: n }, (_, i) => h("option", { value: i }, `${label} ${i}`)));
  const selectors = [selector("Layer", whole.layers), selector("Head", whole.heads)];
  const selected = () => selectors.map(({ value }) => value);
  const show = async () => {
    const [layer, head] = selected();
    const answer = await reportErrors(() => api.map(id, layer, head));
    if (!answer || String(selected()) !== String([layer, head])) return;
    const map = new MemoryMap(answer, true);
    paint(canvas, map);
    const held = map.answer.kept.positions.length;
    summary.textContent = `Layer ${layer}, head ${head}: ${formatNumber(held)} of ${formatNumber(map.n)} tokens held.`;
    canvas.setAttribute("aria-label", summary.textContent);
  };
  show();
  await ask("Layers and heads", [h("div", { class: "heads" }, ...selectors), summary, canvas], "Close", { no: "", wide: true });
}
