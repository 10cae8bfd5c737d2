// The text in the colours of the map: what is in sight is shown token by token, the rest stays as it is.

import { h } from "./dom.js";
import { STATES } from "./map.js";

const STEPS = 4; // of strength, each a class: a style for each token would cost more

/**
 * @typedef {{element: HTMLElement, back: () => void, span?: [number, number], chars?: [number, number],
 *   text?: string}} Piece a part of the text: its tokens, or its characters; and the text they are
 */

export class Shading {
  /** @param {(error: Error) => void} onError */
  constructor(onError) {
    this.onError = onError;
    /** @type {Map<Element, Piece>} */
    this.pieces = new Map();
    this.shaded = new Set();
    this.observer = new IntersectionObserver((entries) => this.onSight(entries), { rootMargin: "200px" });
  }

  /**
   * Shades these pieces when they are in sight, and no others.
   * @param {Piece[]} pieces @param {import("./map.js").MemoryMap} map @param {import("./tokens.js").Tokens} tokens
   */
  show(pieces, map, tokens) {
    this.map = map;
    this.tokens = tokens;
    const before = this.pieces;
    this.pieces = new Map(pieces.map((piece) => [piece.element, piece]));
    for (const element of before.keys()) {
      if (!this.pieces.has(element)) this.forget(element);
    }
    for (const [element, piece] of this.pieces) {
      const old = before.get(element);
      if (!old) this.observer.observe(element);
      else if (!this.isSame(old, piece)) this.reshade(element);
      else if (this.shaded.has(element)) this.recolour(element);
    }
  }

  isSame(a, b) {
    return String(a.span ?? a.chars) === String(b.span ?? b.chars) && a.text === b.text;
  }

  /** Brings the text back. */
  clear() {
    for (const [element, piece] of this.pieces) {
      const wasShaded = this.shaded.has(element);
      this.forget(element);
      if (wasShaded) piece.back();
    }
    this.pieces.clear();
  }

  forget(element) {
    this.observer.unobserve(element);
    this.shaded.delete(element);
  }

  /** Another sight of it begins. */
  reshade(element) {
    this.forget(element);
    this.observer.observe(element);
  }

  onSight(entries) {
    for (const { target, isIntersecting } of entries) {
      const piece = this.pieces.get(target);
      if (!piece) continue;
      if (isIntersecting && !this.shaded.has(target)) {
        this.shade(target, piece).catch(this.onError);
      } else if (!isIntersecting && piece.chars && this.shaded.delete(target)) {
        piece.back(); // thousands of tokens that nobody sees would cost memory
      }
    }
  }

  async shade(element, piece) {
    this.shaded.add(element);
    const tokens = piece.span
      ? await this.tokens.range(...piece.span) : await this.tokensOf(piece.chars, piece.text);
    const now = this.pieces.get(element); // another one, if a map has come meanwhile
    if (!this.shaded.has(element) || !now || !this.isSame(now, piece)) return;
    element.classList.add("tokens");
    element.replaceChildren(...tokens.map(({ position, text }) =>
      h("span", { "data-p": position, tabindex: -1, class: this.classOf(position) }, text)));
  }

  /** The tokens of some characters: the first and the last may reach beyond them. */
  async tokensOf([from, to], text) {
    const first = await this.tokens.positionOf(from);
    const last = await this.tokens.positionOf(Math.max(from, to - 1));
    const characters = Array.from(text); // the server counts characters, and JavaScript halves of some
    let begin = 0;
    const found = await this.tokens.range(first, last + 1);
    return found.map(({ position, end }) => {
      const until = Math.min(end - from, characters.length);
      const shown = characters.slice(begin, until).join("");
      begin = Math.max(begin, until);
      return { position, text: shown };
    });
  }

  classOf(position) {
    const state = this.map.states[position] ?? 0;
    return `t ${STATES[state].id} s${Math.ceil(STEPS * this.map.strength(position))}`;
  }

  recolour(element) {
    for (const span of element.children) {
      const name = span.dataset.p ? this.classOf(Number(span.dataset.p)) : span.className;
      if (span.className !== name) span.className = name;
    }
  }
}
