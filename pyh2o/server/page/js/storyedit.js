// Any word of a story can be changed: its text is a text field for a while, and what differs then goes to the server.

import { characters } from "./storytext.js";

export class Editor {
  /** `save` gets what differs, and the text before, when somebody has done; `changed` is called when it begins and ends. */
  constructor(text, save, changed) {
    this.text = text;
    this.save = save;
    this.changed = changed;
    this.isOn = false;
    text.element.addEventListener("blur", () => this.end(true));
    text.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  begin(range) {
    this.before = this.text.whole;
    this.isOn = true;
    addEventListener("beforeunload", stay);
    // Not in the markup: as plain text only, which pasted text becomes, too.
    this.text.element.contentEditable = "plaintext-only";
    this.text.element.focus({ preventScroll: true });
    if (range) getSelection().collapse(range.startContainer, range.startOffset);
    this.changed();
  }

  /** Ends it, with what was changed or as it was. */
  end(isKept) {
    if (!this.isOn) return;
    this.isOn = false;
    removeEventListener("beforeunload", stay);
    const { before } = this;
    const after = isKept ? written(this.text.element) : before;
    this.text.element.contentEditable = "false";
    // A browser leaves elements of its own behind.
    this.text.clear();
    this.text.set(after);
    this.changed();
    if (after !== before) this.save(difference(before, after), before);
  }

  onKey(event) {
    if (!this.isOn) return;
    event.stopPropagation(); // the keys of the page are letters here
    if (event.key === "Escape") this.end(false);
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.end(true);
    else return;
    event.preventDefault();
  }
}

/** Has the browser ask before it leaves the page. */
const stay = (event) => event.preventDefault();

/** What an element says, a <br> being a line break. */
function written(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  if (node.nodeName === "BR") return "\n";
  return [...node.childNodes].map(written).join("");
}

/** What is between the beginning and the end that two texts share, in characters as the server counts them. */
function difference(before, after) {
  const most = Math.min(before.length, after.length);
  let start = 0;
  while (start < most && before[start] === after[start]) start += 1;
  let same = 0;
  while (same < most - start && before.at(-1 - same) === after.at(-1 - same)) same += 1;
  const isHalf = (text, at) => (text.charCodeAt(at) & 0xfc00) === 0xdc00;
  if (isHalf(before, start) || isHalf(after, start)) start -= 1;
  if (same && isHalf(before, before.length - same)) same -= 1;
  return {
    start: characters(before.slice(0, start)),
    end: characters(before.slice(0, before.length - same)),
    text: after.slice(start, after.length - same),
  };
}
