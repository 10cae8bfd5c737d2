// The tokens of a session, fetched in pages as they are needed; and the way from characters, and from a selection, to them.

import * as api from "./api.js";

const PAGE = 2000;
const MOST_PAGES = 40;

export class Tokens {
  /** Of a session of `n` tokens and `length` characters. */
  constructor(name, n, length) {
    this.name = name;
    this.n = n;
    this.length = length;
    this.pages = new Map(); // promises of {start, texts, ends, from, to}, the last two in characters
  }

  /** The text has grown or has been cut: what is behind `from` tokens is asked for again. */
  resize(n, length, from) {
    for (const page of [...this.pages.keys()]) {
      if ((page + 1) * PAGE > Math.min(from, this.n, n)) this.pages.delete(page);
    }
    this.n = n;
    this.length = length;
  }

  page(number) {
    const known = this.pages.get(number);
    if (known) return known;
    const fetched = this.fetch(number);
    fetched.catch(() => this.pages.delete(number));
    this.pages.set(number, fetched);
    if (this.pages.size > MOST_PAGES) this.pages.delete(this.pages.keys().next().value);
    return fetched;
  }

  async fetch(number) {
    const start = number * PAGE;
    // The end of the token in front is where the first one of the page begins.
    const extra = start ? 1 : 0;
    const { texts, ends } = await api.tokens(this.name, start - extra, Math.min(this.n, start + PAGE));
    const page = { start, texts: texts.slice(extra), ends: ends.slice(extra) };
    return { ...page, from: extra ? ends[0] : 0, to: page.ends.at(-1) ?? (extra ? ends[0] : 0) };
  }

  /** Tokens `start` to `end`: of each the position, the text, and the character behind it. */
  async range(start, end) {
    const found = [];
    for (let number = Math.floor(start / PAGE); number * PAGE < end; number += 1) {
      const page = await this.page(number);
      const to = Math.min(end - page.start, page.texts.length);
      for (let i = Math.max(0, start - page.start); i < to; i += 1) {
        found.push({ position: page.start + i, text: page.texts[i], end: page.ends[i] });
      }
    }
    return found;
  }

  /** The character at which a token begins. */
  async offsetOf(position) {
    const page = await this.page(Math.floor(position / PAGE));
    const i = position - page.start;
    return i ? page.ends[i - 1] ?? page.to : page.from;
  }

  /** The token that has a character: guessed from the pages around it, which converges in a few steps. */
  async positionOf(offset) {
    let low = { page: 0, at: 0 };
    let high = { page: Math.max(0, Math.ceil(this.n / PAGE) - 1), at: this.length };
    while (low.page < high.page) {
      const part = (offset - low.at) / Math.max(1, high.at - low.at);
      const pages = high.page - low.page + 1;
      const guess = low.page + Math.min(pages - 1, Math.max(0, Math.floor(part * pages)));
      const page = await this.page(guess);
      if (offset < page.from) high = { page: guess - 1, at: page.from };
      else if (offset >= page.to) low = { page: guess + 1, at: page.to };
      else low = high = { page: guess, at: 0 };
    }
    const page = await this.page(Math.max(0, low.page));
    const i = page.ends.findIndex((end) => end > offset);
    return page.start + (i < 0 ? page.ends.length : i);
  }
}

// Which tokens a selection is: what is shown has no marks of Markdown, so letters, digits and pictures are compared.

const COUNTED = /[\p{L}\p{N}\p{So}\p{Extended_Pictographic}]/gu;

/** What is shown of an element before a selection. */
export function textBefore(element, selection) {
  const range = document.createRange();
  range.setStart(element, 0);
  range.setEnd(selection.startContainer, selection.startOffset);
  return range.toString();
}

/** The tokens of some shown text: of all places that have it, the one with as much before it. */
export function spanIn(tokens, shown, before) {
  const positions = []; // of the token that each letter is in
  let all = "";
  for (const { position, text } of tokens) {
    const letters = lettersOf(text);
    all += letters;
    for (let i = 0; i < letters.length; i += 1) positions.push(position);
  }
  const wanted = lettersOf(shown);
  if (!wanted) return null;
  const expected = lettersOf(before).length;
  let found = -1;
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + 1)) {
    if (found < 0 || Math.abs(at - expected) < Math.abs(found - expected)) found = at;
  }
  return found < 0 ? null : { start: positions[found], end: positions[found + wanted.length - 1] + 1 };
}

const lettersOf = (text) => (text.match(COUNTED) ?? []).join("");
