// The tokens of a session, fetched as they are needed; and the way from characters, and from a selection, to them.

import * as api from "./api.js";

const MOST = 10_000; // the server tells no more at once
const UNSURE = 2000; // what is behind a text that has changed may be other tokens than before

export class Tokens {
  constructor(name) {
    this.name = name;
    this.n = 0;
    this.texts = [];
    this.ends = []; // in characters
    this.fetched = Promise.resolve();
  }

  /** The text has `n` tokens now: the new ones are asked for, and the last ones of before again. */
  follow(n) {
    if (n === this.n) return;
    this.n = n;
    this.fetched = this.fetched.catch(() => null).then(() => this.fetch(n));
    this.fetched.catch(() => { this.n = 0; }); // the next one asks again
  }

  async fetch(n) {
    this.texts.length = this.ends.length = Math.max(0, Math.min(n, this.texts.length - UNSURE));
    while (this.texts.length < n) {
      const from = this.texts.length;
      const { texts, ends } = await api.tokens(this.name, from, Math.min(n, from + MOST));
      if (!texts.length) return;
      this.texts.push(...texts);
      this.ends.push(...ends);
    }
  }

  /** Tokens `start` to `end`: of each the position, the text, and the character behind it. */
  async range(start, end) {
    await this.fetched;
    return this.texts.slice(start, end).map((text, i) => ({ position: start + i, text, end: this.ends[start + i] }));
  }

  /** The character at which a token begins. */
  async offsetOf(position) {
    await this.fetched;
    return this.ends[position - 1] ?? 0;
  }

  /** The token that has a character. */
  async positionOf(offset) {
    await this.fetched;
    const position = this.ends.findIndex((end) => end > offset);
    return position < 0 ? this.ends.length : position;
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
