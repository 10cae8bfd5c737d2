// Editing a story: its text becomes an editable element, and the difference is sent to the server.

import { countCharacters } from "./storytext.js";

export class Editor {
  /** `save` gets the change and the text before it; `onChange` is called at the start and the end. */
  constructor(text, save, onChange) {
    this.text = text;
    this.save = save;
    this.onChange = onChange;
    this.isOn = false;
    text.element.addEventListener("blur", () => this.end(true));
    text.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  start(range) {
    this.before = this.text.whole;
    this.isOn = true;
    addEventListener("beforeunload", askBeforeLeaving);
    // Pasted text becomes plain text too.
    this.text.element.contentEditable = "plaintext-only";
    this.text.element.focus({ preventScroll: true });
    if (range) getSelection().collapse(range.startContainer, range.startOffset);
    this.onChange();
  }

  /** Ends editing, and saves or discards the changes. */
  end(isSaved) {
    if (!this.isOn) return;
    this.isOn = false;
    removeEventListener("beforeunload", askBeforeLeaving);
    const { before } = this;
    const after = isSaved ? textOf(this.text.element) : before;
    this.text.element.contentEditable = "false";
    // Editing has added and changed elements.
    this.text.clear();
    this.text.set(after);
    this.onChange();
    if (after !== before) this.save(difference(before, after), before);
  }

  onKey(event) {
    if (!this.isOn) return;
    event.stopPropagation(); // disables the page's shortcuts
    if (event.key === "Escape") this.end(false);
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.end(true);
    else return;
    event.preventDefault();
  }
}

const askBeforeLeaving = (event) => event.preventDefault();

/** The text of an element, with <br> as a line break. */
function textOf(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  if (node.nodeName === "BR") return "\n";
  return [...node.childNodes].map(textOf).join("");
}

/** The change between the common prefix and suffix of two texts, in characters. */
function difference(before, after) {
  const most = Math.min(before.length, after.length);
  let start = 0;
  while (start < most && before[start] === after[start]) start += 1;
  let same = 0;
  while (same < most - start && before.at(-1 - same) === after.at(-1 - same)) same += 1;
  const isLowSurrogate = (text, at) => (text.charCodeAt(at) & 0xfc00) === 0xdc00;
  if (isLowSurrogate(before, start) || isLowSurrogate(after, start)) start -= 1;
  if (same && isLowSurrogate(before, before.length - same)) same -= 1;
  return {
    start: countCharacters(before.slice(0, start)),
    end: countCharacters(before.slice(0, before.length - same)),
    text: after.slice(start, after.length - same),
  };
}
