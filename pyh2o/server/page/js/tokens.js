// The tokens of a session, fetched on demand, and the mapping from characters and selections to tokens.

import * as api from "./api.js";

const MAX_FETCHED = 10_000; // the server's limit per request
const REFETCHED = 2000; // tokens at the end can change when text is appended

export class Tokens {
  constructor(id) {
    this.id = id; // of the session
    this.n = 0;
    this.texts = [];
    this.ends = []; // in characters
    this.fetched = Promise.resolve();
  }

  /** Fetches new tokens, and the last old ones again, if the text has `n` tokens now. */
  update(n) {
    if (n === this.n) return;
    this.n = n;
    this.fetched = this.fetched.catch(() => null).then(() => this.fetch(n));
    this.fetched.catch(() => { this.n = 0; }); // the next update tries again
  }

  async fetch(n) {
    this.texts.length = this.ends.length = Math.max(0, Math.min(n, this.texts.length - REFETCHED));
    while (this.texts.length < n) {
      const from = this.texts.length;
      const { texts, ends } = await api.tokens(this.id, from, Math.min(n, from + MAX_FETCHED));
      if (!texts.length) return;
      this.texts.push(...texts);
      this.ends.push(...ends);
    }
  }

  /** Tokens `start` to `end`, each with position, text, and end in characters. */
  async range(start, end) {
    await this.fetched;
    return this.texts.slice(start, end).map((text, i) => ({ position: start + i, text, end: this.ends[start + i] }));
  }

  /** The first character of a token. */
  async characterOf(position) {
    await this.fetched;
    return this.ends[position - 1] ?? 0;
  }

  /** The token that contains a character. */
  async positionOf(character) {
    await this.fetched;
    const position = this.ends.findIndex((end) => end > character);
    return position < 0 ? this.ends.length : position;
  }
}

// The tokens of a selection. Displayed text has no Markdown syntax, so only letters, digits and symbols are compared.

const COMPARED = /[\p{L}\p{N}\p{So}\p{Extended_Pictographic}]/gu;

/** The displayed text of an element before a selection. */
export function textBefore(element, selection) {
  const range = document.createRange();
  range.setStart(element, 0);
  range.setEnd(selection.startContainer, selection.startOffset);
  return range.toString();
}

/** Finds the tokens of a displayed text; of several matches, the one with the most similar length of text before it. */
export function findTokens(tokens, shown, before) {
  const positions = []; // of the token of each compared character
  let all = "";
  for (const { position, text } of tokens) {
    const compared = comparedOf(text);
    all += compared;
    for (let i = 0; i < compared.length; i += 1) positions.push(position);
  }
  const wanted = comparedOf(shown);
  if (!wanted) return null;
  const expected = comparedOf(before).length;
  let found = -1;
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + 1)) {
    if (found < 0 || Math.abs(at - expected) < Math.abs(found - expected)) found = at;
  }
  return found < 0 ? null : { start: positions[found], end: positions[found + wanted.length - 1] + 1 };
}

const comparedOf = (text) => (text.match(COMPARED) ?? []).join("");
