// The cursor of a story: a click or the arrow keys put it between two words, Esc takes it away.

import { h } from "./dom.js";
import { announce } from "./live.js";
import { writing } from "./making.js";

const MOVES = { ArrowRight: ["forward", "word"], ArrowLeft: ["backward", "word"] };

export class Caret {
  /** @param {import("./storytext.js").StoryText} text @param {HTMLElement} scroller @param {() => void} onChange */
  constructor(text, scroller, onChange) {
    this.text = text;
    this.scroller = scroller;
    this.onChange = onChange;
    /** @type {number|null} null: the story goes on from its end */
    this.place = null;
    this.element = h("div", { class: "caret", hidden: true });
    text.element.append(this.element);
    text.element.addEventListener("click", () => this.fromSelection());
    scroller.addEventListener("keydown", (event) => this.onKey(event));
    this.redraw = () => this.draw();
    addEventListener("resize", this.redraw);
    // Chunks in front get their true heights when they come into sight.
    scroller.addEventListener("scroll", this.redraw, { passive: true });
  }

  /** The collapsed selection that a click leaves says where it was. */
  fromSelection() {
    const selection = getSelection();
    if (writing() || !selection.isCollapsed || !selection.focusNode) return;
    const place = this.text.placeOf(selection.focusNode, selection.focusOffset);
    if (place !== null) this.put(place);
  }

  put(place) {
    this.place = place >= this.text.size ? null : place;
    this.draw();
    this.onChange();
  }

  clear() {
    this.place = null;
    this.draw();
    this.onChange();
  }

  onKey(event) {
    if (event.key === "Escape" && this.place !== null && !writing()) {
      event.stopPropagation();
      this.clear();
    }
    const move = MOVES[event.key];
    if (!move || event.target !== this.scroller || event.ctrlKey || event.altKey || writing()) return;
    event.preventDefault();
    const selection = getSelection();
    const begin = this.rangeAt(this.place ?? this.text.size);
    if (!begin) return;
    selection.collapse(begin.startContainer, begin.startOffset);
    selection.modify("move", ...move);
    this.fromSelection();
    announce(this.place === null ? "at the end" : this.around());
  }

  around() {
    const chunk = this.text.chunks.findLast(({ start }) => start <= this.place);
    const at = this.place - chunk.start;
    return `before: ${chunk.text.slice(at, at + 40)}`;
  }

  rangeAt(place) {
    return this.text.rangeAt(this.text.characterAt(place))?.range;
  }

  draw() {
    const range = this.place === null ? null : this.rangeAt(this.place);
    this.element.hidden = !range;
    if (!range) return;
    const rect = range.getClientRects()[0] ?? range.getBoundingClientRect();
    const paper = this.text.element.getBoundingClientRect();
    this.element.style.left = `${rect.left - paper.left - 1}px`;
    this.element.style.top = `${rect.top - paper.top}px`;
    this.element.style.height = `${rect.height || 24}px`;
  }

  dispose() {
    removeEventListener("resize", this.redraw);
  }
}
