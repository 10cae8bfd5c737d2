// The text of a story in chunks, so that the browser lays out only the visible ones and appending is cheap.

// Offsets count UTF-16 units, as JavaScript does; characters are code points, as the server counts.

import { h } from "./dom.js";

const CHUNK = 4000;
const MAX_CHUNK = 2 * CHUNK;

export function countCharacters(text) {
  let n = 0;
  for (const _ of text) n += 1;
  return n;
}

/** The length of the first chunk of a text: up to a line break if possible, else a space. */
function chunkLength(text) {
  if (text.length <= MAX_CHUNK) return text.length;
  const line = text.lastIndexOf("\n", MAX_CHUNK - 1);
  if (line >= CHUNK / 2) return line + 1;
  const word = text.lastIndexOf(" ", CHUNK);
  if (word >= CHUNK / 2) return word + 1;
  return (text.charCodeAt(CHUNK) & 0xfc00) === 0xdc00 ? CHUNK + 1 : CHUNK;
}

export class StoryText {
  constructor(element) {
    this.element = element;
    this.chunks = []; // each with element, text, and its start as `character` and `offset`
    this.nCharacters = 0;
    this.size = 0; // in UTF-16 units
    this.pending = [];
  }

  /** Shows a text, and keeps the chunks of the common prefix. */
  set(text) {
    this.flush();
    const changed = this.chunks.findIndex(({ text: same, offset }) => !text.startsWith(same, offset));
    this.truncate(changed < 0 ? this.chunks.length : changed);
    this.add(text.slice(this.size));
  }

  /** Removes all chunks, and nodes that the browser has added while editing. */
  clear() {
    this.truncate(0);
    for (const node of [...this.element.childNodes]) {
      if (!node.classList?.contains("cursor")) node.remove();
    }
  }

  get whole() {
    this.flush();
    return this.chunks.map(({ text }) => text).join("");
  }

  /** Appends text in the next frame. */
  append(text) {
    if (!this.pending.length) requestAnimationFrame(() => this.flush());
    this.pending.push(text);
  }

  flush() {
    const text = this.pending.join("");
    this.pending = [];
    if (text) this.add(text);
  }

  /** Keeps the first `n` chunks. */
  truncate(n) {
    for (const { element } of this.chunks.splice(n)) element.remove();
    const last = this.chunks.at(-1);
    this.size = last ? last.offset + last.text.length : 0;
    this.nCharacters = last ? last.character + countCharacters(last.text) : 0;
  }

  add(text) {
    const last = this.chunks.at(-1);
    if (last && last.text.length < CHUNK) {
      const end = chunkLength(last.text + text) - last.text.length;
      const more = text.slice(0, Math.max(0, end));
      this.extend(last, more);
      text = text.slice(more.length);
    }
    while (text) {
      const end = chunkLength(text);
      this.addChunk(text.slice(0, end));
      text = text.slice(end);
    }
  }

  extend(chunk, more) {
    if (!more) return;
    this.restore(chunk);
    chunk.text += more;
    chunk.element.firstChild.appendData(more);
    this.size += more.length;
    this.nCharacters += countCharacters(more);
  }

  addChunk(text) {
    const element = h("div", { class: "chunk", dir: "auto" }, text);
    this.chunks.push({ element, text, character: this.nCharacters, offset: this.size });
    this.size += text.length;
    this.nCharacters += countCharacters(text);
    this.element.append(element);
  }

  /** Removes the shading of a chunk. */
  restore(chunk) {
    if (!chunk.element.classList.contains("shaded")) return;
    chunk.element.classList.remove("shaded");
    chunk.element.replaceChildren(chunk.text);
  }

  /** The offset of a point in the document; null if it is outside the text. */
  offsetOf(node, nodeOffset) {
    const chunk = this.chunks.find(({ element }) => element.contains(node));
    if (!chunk) return null;
    const range = document.createRange();
    range.setStart(chunk.element, 0);
    range.setEnd(node, nodeOffset);
    return chunk.offset + range.toString().length;
  }

  characterAt(offset) {
    const chunk = this.chunks.findLast((each) => each.offset <= offset);
    return chunk ? chunk.character + countCharacters(chunk.text.slice(0, offset - chunk.offset)) : 0;
  }

  /** The chunk of a character, and a collapsed range before it. */
  rangeAt(character) {
    const chunk = this.chunks.findLast((each) => each.character <= character);
    if (!chunk) return null;
    const n = character - chunk.character;
    let left = Array.from(chunk.text.slice(0, 2 * n)).slice(0, n).join("").length;
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
