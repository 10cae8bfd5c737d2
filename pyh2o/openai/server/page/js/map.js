// The memory map of a text: for each token what the cache has of it, in typed arrays; no drawing.

import { count, counted, percent } from "./format.js";

// What a token is, from the least to what is shown where several hold.
export const LOST = 0, ARCHIVED = 1, HELD = 2, RECENT = 3, PINNED = 4, RECALLED = 5, UNREAD = 6;

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
  /** @param {any} answer of the map's route @param {boolean} isPair of one layer and head */
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

  /** The number of tokens in each state. */
  totals() {
    const totals = new Array(STATES.length).fill(0);
    for (let i = 0; i < this.n; i += 1) totals[this.states[i]] += 1;
    return totals;
  }

  /** The map in a sentence. */
  summary() {
    if (!this.n) return "There is no text yet.";
    const totals = this.totals();
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
