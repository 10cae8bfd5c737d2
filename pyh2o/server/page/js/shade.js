// The text in the colours of the map; what is known of a token of it; and "Pin" beside what is selected.

import * as api from "./api.js";
import { announce, button, careful, count, h } from "./dom.js";
import { STATES } from "./map.js";

const STEPS = 4; // of strength, each a class: a style for each token would cost more

// A piece is a part of the text: its element, its tokens (`span`) or characters (`chars`), the text that they are, and
// `back`, which shows it without colours.

export class Shading {
  constructor(onError) {
    this.onError = onError;
    this.pieces = new Map();
    this.shaded = new Set();
    this.observer = new IntersectionObserver((entries) => this.onSight(entries), { rootMargin: "200px" });
  }

  /** Shades these pieces when they are in sight, and no others. */
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
      else if (!this.isSame(old, piece)) {
        this.forget(element);
        this.observer.observe(element); // another sight of it begins
      } else if (this.shaded.has(element)) this.recolour(element);
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

// What is known of the token under the pointer or with the focus, and the keys that go along the tokens.

const REST_MS = 150;

export class Tip {
  constructor(togglePin) {
    this.name = "";
    this.togglePin = togglePin;
    this.element = h("div", { id: "tip", role: "tooltip", hidden: true });
    document.body.append(this.element);
    document.addEventListener("pointerover", ({ target }) => this.at(target.closest?.("[data-p]")));
    document.addEventListener("focusin", ({ target }) => this.at(target.closest?.("[data-p]")));
    document.addEventListener("keydown", (event) => this.onKey(event), true);
    document.addEventListener("scroll", () => this.at(null), true);
  }

  at(token) {
    if (token === this.token) return;
    this.token = token;
    clearTimeout(this.timer);
    this.element.hidden = true;
    if (token) this.timer = setTimeout(() => this.show(token), REST_MS);
  }

  async show(token) {
    const known = await api.token(this.name, Number(token.dataset.p)).catch(() => null);
    if (!known || this.token !== token) return;
    const lines = describe(known);
    this.element.replaceChildren(...lines.map((line) => h("div", {}, line)));
    this.element.hidden = false;
    const { left, bottom, top } = token.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.element;
    const isLow = bottom + offsetHeight + 12 > innerHeight;
    this.element.style.left = `${Math.max(8, Math.min(left, innerWidth - offsetWidth - 8))}px`;
    this.element.style.top = `${isLow ? top - offsetHeight - 6 : bottom + 6}px`;
    if (document.activeElement === token) announce(lines.join(" "));
  }

  onKey(event) {
    if (event.key === "Escape" && !this.element.hidden) {
      event.stopPropagation();
      return this.at(null);
    }
    const token = event.target.closest?.("[data-p]");
    const isShaded = event.target.closest?.(".tokens, .scroller")?.querySelector?.("[data-p]");
    if (!isShaded || event.ctrlKey || event.altKey || event.metaKey) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      const next = token ? neighbour(token, step) : inSight(event.target);
      event.preventDefault();
      event.stopPropagation();
      next?.focus();
    } else if (event.key === "p" && token) {
      this.togglePin(Number(token.dataset.p));
    }
  }
}

/** The token beside one, which may lie in the next paragraph or message. */
function neighbour(token, step) {
  const beside = step > 0 ? token.nextElementSibling : token.previousElementSibling;
  if (beside?.dataset.p) return beside;
  const all = [...token.closest(".scroller").querySelectorAll("[data-p]")];
  return all[all.indexOf(token) + step];
}

function inSight(scroller) {
  const { top } = scroller.getBoundingClientRect();
  return [...scroller.querySelectorAll("[data-p]")].find((token) => token.getBoundingClientRect().top >= top);
}

/** A token in lines of words. */
function describe({ position, text, score, rows, pairs, held, recent, pinned, archived, recalled }) {
  const lines = [`Token ${count(position)}: ${JSON.stringify(text)}`];
  const states = [pinned && "pinned", recent && "recent", recalled && "recalled", archived && "in the archive"].filter(Boolean);
  if (states.length) lines.push(`It is ${states.join(", ")}.`);
  lines.push(rows ? `Held by ${count(rows)} of ${count(pairs)} pairs of layer and head.` : "No layer and head holds it.");
  if (rows && held?.length && held.length <= 6) {
    lines.push(`Layer and head: ${held.map(([layer, head]) => `${layer}·${head}`).join(", ")}.`);
  }
  if (score !== null && score !== undefined) lines.push(`Score ${score.toPrecision(3)}.`);
  return lines;
}

// "Pin" and "Unpin" beside selected text.

export class Pins {
  constructor(page, onChange) {
    this.page = page;
    this.onChange = onChange;
    // Else the click would take the selection away before it is read.
    const keep = { pointerdown: (event) => event.preventDefault() };
    this.bar = h("div", { class: "pin-bar", role: "toolbar", "aria-label": "Selected text", hidden: true },
      button("Pin", () => this.set(true), keep), button("Unpin", () => this.set(false), keep));
    document.body.append(this.bar);
    document.addEventListener("selectionchange", () => this.onSelection());
  }

  onSelection() {
    const selection = getSelection();
    const text = this.page.view?.element.querySelector(".scroller");
    const isOurs = !selection.isCollapsed && this.page.session && text?.contains(selection.anchorNode)
      && text.contains(selection.focusNode) && selection.toString().trim();
    this.bar.hidden = !isOurs;
    if (!isOurs) return;
    const { left, bottom } = selection.getRangeAt(0).getBoundingClientRect();
    this.bar.style.left = `${Math.max(8, Math.min(left, innerWidth - 170))}px`;
    this.bar.style.top = `${Math.max(8, Math.min(bottom + 8, innerHeight - 60))}px`;
  }

  async set(isPin) {
    const selection = getSelection();
    const range = selection.getRangeAt(0);
    const { viewed } = this.page; // another one may be open when the tokens have come
    const what = spanOf(range) ?? await this.page.view.selected(selection.toString().trim(), range);
    selection.removeAllRanges();
    await this.send(viewed, isPin, what);
  }

  /** Pins a token, or unpins it. */
  togglePin(position, isPinned) {
    return this.send(this.page.viewed, !isPinned, { start: position, end: position + 1 });
  }

  async send(name, isPin, what) {
    const done = await careful(() => (isPin ? api.pin : api.unpin)(name, what));
    if (!done) return;
    announce(isPin ? "Pinned" : "Unpinned");
    this.onChange();
  }
}

/** The tokens of a selection in shaded text. */
function spanOf(range) {
  const position = (node) => {
    const element = node.nodeType === Node.TEXT_NODE ? node.parentElement : node;
    const token = element.closest("[data-p]");
    return token ? Number(token.dataset.p) : null;
  };
  const [start, end] = [position(range.startContainer), position(range.endContainer)];
  return start === null || end === null ? null : { start, end: end + 1 };
}
