// The text in the colours of the map; the keys that go along its tokens; and "Pin" beside what is selected.

import * as api from "./api.js";
import { announce, button, careful, complain, h } from "./dom.js";
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
    for (const old of element.querySelectorAll("[data-p]")) old.replaceWith(...old.childNodes);
    element.normalize();
    const span = (position, shown) => h("span", { "data-p": position, tabindex: -1, class: this.classOf(position) }, shown);
    if (piece.span) around(element, tokens, piece.text, span);
    else element.replaceChildren(...tokens.map(({ position, text }) => span(position, text)));
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
    for (const span of element.querySelectorAll("[data-p]")) {
      const name = this.classOf(Number(span.dataset.p));
      if (span.className !== name) span.className = name;
    }
  }
}

const NOT_SAID = "button, summary, .code-head, .katex";
const REACH = 2000; // marks and addresses in a row that Markdown does not show

/** Puts spans around the text that is shown: of its tokens, without the marks of Markdown and of the chat template. */
function around(element, tokens, text, span) {
  const all = tokens.map((token) => token.text).join("");
  const same = (a, b) => a === b || (/\s/.test(a) && /\s/.test(b));
  let at = Math.max(0, all.indexOf(text));
  let n = 0;
  let end = tokens[0]?.text.length ?? 0;
  const ownerOf = (sign) => {
    let found = at;
    while (found < all.length && !same(all[found], sign)) found += 1;
    if (found >= Math.min(all.length, at + REACH)) return null; // nobody has said that
    at = found + 1;
    while (end <= found) end += tokens[n += 1].text.length;
    return tokens[n].position;
  };
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes.filter(({ parentElement }) => !parentElement.closest(NOT_SAID))) {
    const parts = [];
    for (const sign of node.data.split("")) {
      const owner = ownerOf(sign);
      const last = parts.at(-1);
      if (last?.owner === owner) last.shown += sign;
      else parts.push({ owner, shown: sign });
    }
    node.replaceWith(...parts.map(({ owner, shown }) => (owner === null ? shown : span(owner, shown))));
  }
}

// The token under the pointer or with the focus, and the keys that go along the tokens.

/** `tell` gets a token's position and text, and whether it has the focus; `togglePin` its position. */
export function followTokens(tell, togglePin) {
  const at = ({ target, type }) => {
    const token = target.closest?.("[data-p]");
    if (token) tell(Number(token.dataset.p), token.textContent, type === "focusin");
  };
  document.addEventListener("pointerover", at);
  document.addEventListener("focusin", at);
  document.addEventListener("keydown", (event) => onKey(event, togglePin), true);
}

function onKey(event, togglePin) {
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
    togglePin(Number(token.dataset.p));
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
    const what = spanOf(range) ?? await careful(() => this.page.view.selected(selection.toString().trim(), range));
    selection.removeAllRanges();
    await this.send(viewed, isPin, what);
  }

  /** Pins a token, or unpins it. */
  togglePin(position, isPinned) {
    return this.send(this.page.viewed, !isPinned, { start: position, end: position + 1 });
  }

  async send(name, isPin, what) {
    if (!what) return complain("Select text of one message or answer.");
    if (!await careful(() => (isPin ? api.pin : api.unpin)(name, what))) return;
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
