// Text shaded by the state of its tokens, keyboard navigation along tokens, and the Pin buttons for a selection.

import * as api from "./api.js";
import { announce, button, h, reportErrors, showToast } from "./dom.js";
import { STATES } from "./map.js";

const STEPS = 4; // of strength: classes are faster than a style for each token

// A part of the text has an element, its tokens (`span`) or characters (`chars`), its text, and `restore`, which removes the
// shading.

export class Shading {
  constructor(onError) {
    this.onError = onError;
    this.parts = new Map();
    this.shaded = new Set();
    this.observer = new IntersectionObserver((entries) => this.onVisible(entries), { rootMargin: "200px" });
  }

  /** Shades these parts of the text when they become visible. */
  show(parts, map, tokens) {
    this.map = map;
    this.tokens = tokens;
    const before = this.parts;
    this.parts = new Map(parts.map((part) => [part.element, part]));
    for (const element of before.keys()) {
      if (!this.parts.has(element)) this.remove(element);
    }
    for (const [element, part] of this.parts) {
      const old = before.get(element);
      if (!old) this.observer.observe(element);
      else if (!this.isSame(old, part)) {
        this.remove(element);
        this.observer.observe(element); // calls onVisible again
      } else if (this.shaded.has(element)) this.updateClasses(element);
    }
  }

  isSame(a, b) {
    return String(a.span ?? a.chars) === String(b.span ?? b.chars) && a.text === b.text;
  }

  /** Removes the shading. */
  clear() {
    for (const [element, part] of this.parts) {
      const wasShaded = this.shaded.has(element);
      this.remove(element);
      if (wasShaded) part.restore();
    }
    this.parts.clear();
  }

  remove(element) {
    this.observer.unobserve(element);
    this.shaded.delete(element);
  }

  onVisible(entries) {
    for (const { target, isIntersecting } of entries) {
      const part = this.parts.get(target);
      if (!part) continue;
      if (isIntersecting && !this.shaded.has(target)) {
        this.shade(target, part).catch(this.onError);
      } else if (!isIntersecting && part.chars && this.shaded.delete(target)) {
        part.restore(); // saves the memory of invisible token elements
      }
    }
  }

  async shade(element, part) {
    this.shaded.add(element);
    const tokens = part.span
      ? await this.tokens.range(...part.span) : await this.tokensOf(part.chars, part.text);
    const now = this.parts.get(element); // replaced if a new map has arrived
    if (!this.shaded.has(element) || !now || !this.isSame(now, part)) return;
    element.classList.add("shaded");
    for (const old of element.querySelectorAll("[data-p]")) old.replaceWith(...old.childNodes);
    element.normalize();
    const span = (position, text) => h("span", { "data-p": position, tabindex: -1, class: this.classOf(position) }, text);
    if (part.span) wrapTokens(element, tokens, part.text, span);
    else element.replaceChildren(...tokens.map(({ position, text }) => span(position, text)));
  }

  /** The tokens of a range of characters; the first and the last are cut to the range. */
  async tokensOf([from, to], text) {
    const first = await this.tokens.positionOf(from);
    const last = await this.tokens.positionOf(Math.max(from, to - 1));
    const characters = Array.from(text); // code points, as the server counts, and not UTF-16 units
    let start = 0;
    const tokens = await this.tokens.range(first, last + 1);
    return tokens.map(({ position, end }) => {
      const until = Math.min(end - from, characters.length);
      const shown = characters.slice(start, until).join("");
      start = Math.max(start, until);
      return { position, text: shown };
    });
  }

  classOf(position) {
    const state = this.map.states[position] ?? 0;
    return `token ${STATES[state].id} s${Math.ceil(STEPS * this.map.strength(position))}`;
  }

  updateClasses(element) {
    for (const span of element.querySelectorAll("[data-p]")) {
      const name = this.classOf(Number(span.dataset.p));
      if (span.className !== name) span.className = name;
    }
  }
}

const NOT_IN_TEXT = "button, summary, .code-head, .katex";
const MAX_SKIPPED = 2000; // consecutive characters of Markdown syntax and addresses, which are not displayed

/** Wraps displayed text in spans of its tokens, skipping token text that is not displayed: Markdown and chat template syntax. */
function wrapTokens(element, tokens, text, span) {
  const all = tokens.map((token) => token.text).join("");
  const same = (a, b) => a === b || (/\s/.test(a) && /\s/.test(b));
  let at = Math.max(0, all.indexOf(text));
  let n = 0;
  let end = tokens[0]?.text.length ?? 0;
  const positionOf = (character) => {
    let found = at;
    while (found < all.length && !same(all[found], character)) found += 1;
    if (found >= Math.min(all.length, at + MAX_SKIPPED)) return null; // not part of the text
    at = found + 1;
    while (end <= found) end += tokens[n += 1].text.length;
    return tokens[n].position;
  };
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes.filter(({ parentElement }) => !parentElement.closest(NOT_IN_TEXT))) {
    const parts = [];
    for (const character of node.data.split("")) {
      const position = positionOf(character);
      const last = parts.at(-1);
      if (last?.position === position) last.shown += character;
      else parts.push({ position, shown: character });
    }
    node.replaceWith(...parts.map(({ position, shown }) => (position === null ? shown : span(position, shown))));
  }
}

/** Follows the token under the pointer or with the focus, and handles keys on tokens.
 *  `onToken` gets its position, its text, and whether it has the focus; `togglePin` its position. */
export function followTokens(onToken, togglePin) {
  const onEvent = ({ target, type }) => {
    const token = target.closest?.("[data-p]");
    if (token) onToken(Number(token.dataset.p), token.textContent, type === "focusin");
  };
  document.addEventListener("pointerover", onEvent);
  document.addEventListener("focusin", onEvent);
  document.addEventListener("keydown", (event) => onKey(event, togglePin), true);
}

function onKey(event, togglePin) {
  const token = event.target.closest?.("[data-p]");
  const isShaded = event.target.closest?.(".shaded, .scroller")?.querySelector?.("[data-p]");
  if (!isShaded || event.ctrlKey || event.altKey || event.metaKey) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) {
    const next = token ? neighbour(token, step) : firstVisible(event.target);
    event.preventDefault();
    event.stopPropagation();
    next?.focus();
  } else if (event.key === "p" && token) {
    togglePin(Number(token.dataset.p));
  }
}

/** The next or previous token, also in another paragraph or message. */
function neighbour(token, step) {
  const sibling = step > 0 ? token.nextElementSibling : token.previousElementSibling;
  if (sibling?.dataset.p) return sibling;
  const all = [...token.closest(".scroller").querySelectorAll("[data-p]")];
  return all[all.indexOf(token) + step];
}

function firstVisible(scroller) {
  const { top } = scroller.getBoundingClientRect();
  return [...scroller.querySelectorAll("[data-p]")].find((token) => token.getBoundingClientRect().top >= top);
}

/** The Pin and Unpin buttons next to selected text. */
export class Pins {
  constructor(page, onChange) {
    this.page = page;
    this.onChange = onChange;
    // Keep the selection: the click would remove it before it is read.
    const keep = { pointerdown: (event) => event.preventDefault() };
    this.bar = h("div", { class: "pin-bar", role: "toolbar", "aria-label": "Selected text", hidden: true },
      button("Pin", () => this.set(true), keep), button("Unpin", () => this.set(false), keep));
    document.body.append(this.bar);
    document.addEventListener("selectionchange", () => this.onSelection());
  }

  onSelection() {
    const selection = getSelection();
    const text = this.page.view?.element.querySelector(".scroller");
    const isInText = !selection.isCollapsed && this.page.session && text?.contains(selection.anchorNode)
      && text.contains(selection.focusNode) && selection.toString().trim();
    this.bar.hidden = !isInText;
    if (!isInText) return;
    const { left, bottom } = selection.getRangeAt(0).getBoundingClientRect();
    this.bar.style.left = `${Math.max(8, Math.min(left, innerWidth - 170))}px`;
    this.bar.style.top = `${Math.max(8, Math.min(bottom + 8, innerHeight - 60))}px`;
  }

  async set(isPin) {
    const selection = getSelection();
    const range = selection.getRangeAt(0);
    const { shownId } = this.page; // another session may be open when the tokens have arrived
    const tokens = spanOf(range) ?? await reportErrors(() => this.page.view.selectedTokens(selection.toString().trim(), range));
    selection.removeAllRanges();
    await this.send(shownId, isPin, tokens);
  }

  togglePin(position, isPinned) {
    return this.send(this.page.shownId, !isPinned, { start: position, end: position + 1 });
  }

  async send(name, isPin, tokens) {
    if (!tokens) return showToast("Select text within one message or answer.");
    if (!await reportErrors(() => (isPin ? api.pin : api.unpin)(name, tokens))) return;
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
