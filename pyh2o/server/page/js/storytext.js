// The text of a story in chunks, so that the browser lays out only what is in sight and text is added at the end only.

import { h } from "./dom.js";

const CHUNK = 4000;
const LONGEST = 2 * CHUNK;

/** Characters as the server counts them: JavaScript counts two for those beyond the first plane. */
export function characters(text) {
  let n = 0;
  for (const _ of text) n += 1;
  return n;
}

/** Where the first chunk of a text ends: behind a line if there is one, else behind a word. */
function cutAt(text) {
  if (text.length <= LONGEST) return text.length;
  const line = text.lastIndexOf("\n", LONGEST - 1);
  if (line >= CHUNK / 2) return line + 1;
  const word = text.lastIndexOf(" ", CHUNK);
  if (word >= CHUNK / 2) return word + 1;
  return (text.charCodeAt(CHUNK) & 0xfc00) === 0xdc00 ? CHUNK + 1 : CHUNK;
}

export class StoryText {
  constructor(element) {
    this.element = element;
    this.chunks = []; // of each the element, the text, `from` in characters, `start` as in JavaScript
    this.length = 0; // in characters
    this.size = 0; // as in JavaScript
    this.waiting = [];
  }

  /** Shows a text; the chunks that it begins with stay as they are. */
  set(text) {
    this.flush();
    const other = this.chunks.findIndex(({ text: same, start }) => !text.startsWith(same, start));
    this.drop(other < 0 ? this.chunks.length : other);
    this.add(text.slice(this.size));
  }

  /** Shows nothing, also of what others have put there. */
  clear() {
    this.drop(0);
    for (const node of [...this.element.childNodes]) {
      if (!node.classList?.contains("caret")) node.remove();
    }
  }

  /** All of it. */
  get whole() {
    this.flush();
    return this.chunks.map(({ text }) => text).join("");
  }

  /** Adds text at the end, with the next frame. */
  append(text) {
    if (!this.waiting.length) requestAnimationFrame(() => this.flush());
    this.waiting.push(text);
  }

  flush() {
    const text = this.waiting.join("");
    this.waiting = [];
    if (text) this.add(text);
  }

  drop(n) {
    for (const { element } of this.chunks.splice(n)) element.remove();
    const last = this.chunks.at(-1);
    this.size = last ? last.start + last.text.length : 0;
    this.length = last ? last.from + characters(last.text) : 0;
  }

  add(text) {
    const last = this.chunks.at(-1);
    if (last && last.text.length < CHUNK) {
      const end = cutAt(last.text + text) - last.text.length;
      const more = text.slice(0, Math.max(0, end));
      this.grow(last, more);
      text = text.slice(more.length);
    }
    while (text) {
      const end = cutAt(text);
      this.chunk(text.slice(0, end));
      text = text.slice(end);
    }
  }

  grow(chunk, more) {
    if (!more) return;
    this.back(chunk);
    chunk.text += more;
    chunk.element.firstChild.appendData(more);
    this.size += more.length;
    this.length += characters(more);
  }

  chunk(text) {
    const element = h("div", { class: "chunk", dir: "auto" }, text);
    this.chunks.push({ element, text, from: this.length, start: this.size });
    this.size += text.length;
    this.length += characters(text);
    this.element.append(element);
  }

  /** A chunk as plain text again. */
  back(chunk) {
    if (!chunk.element.classList.contains("tokens")) return;
    chunk.element.classList.remove("tokens");
    chunk.element.replaceChildren(chunk.text);
  }

  /** The place of a point of the document, as in JavaScript; null if it is outside. */
  placeOf(node, offset) {
    const chunk = this.chunks.find(({ element }) => element.contains(node));
    if (!chunk) return null;
    const range = document.createRange();
    range.setStart(chunk.element, 0);
    range.setEnd(node, offset);
    return chunk.start + range.toString().length;
  }

  /** The character, as the server counts, of a place. */
  characterAt(place) {
    const chunk = this.chunks.findLast(({ start }) => start <= place);
    return chunk ? chunk.from + characters(chunk.text.slice(0, place - chunk.start)) : 0;
  }

  /** Where a character lies: its chunk and a collapsed range. */
  rangeAt(character) {
    const chunk = this.chunks.findLast(({ from }) => from <= character);
    if (!chunk) return null;
    let left = Array.from(chunk.text.slice(0, 2 * (character - chunk.from))).slice(0, character - chunk.from).join("").length;
    const walker = document.createTreeWalker(chunk.element, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    range.setStart(chunk.element, 0);
    while (walker.nextNode()) {
      if (left <= walker.currentNode.length) {
        range.setStart(walker.currentNode, left);
        break;
      }
      left -= walker.currentNode.length;
    }
    range.collapse(true);
    return { chunk, range };
  }
}
