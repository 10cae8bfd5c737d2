// "Pin" and "Unpin" beside selected text.

import * as api from "./api.js";
import { button, h } from "./dom.js";
import { announce, careful } from "./live.js";

export class Pins {
  /** @param {import("./main.js").Page} page @param {() => void} onChange */
  constructor(page, onChange) {
    this.page = page;
    this.onChange = onChange;
    // Else the click would take the selection away before it is read.
    const keep = { pointerdown: (event) => event.preventDefault() };
    this.bar = h("div", { class: "pin-bar", role: "toolbar", "aria-label": "Selected text", hidden: true },
      button("Pin", () => this.set(true), keep), button("Unpin", () => this.set(false), keep));
    document.body.append(this.bar);
    document.addEventListener("selectionchange", () => this.onSelection());
  }

  onSelection() {
    const selection = getSelection();
    const text = this.page.view?.element.querySelector(".scroller");
    const isOurs = !selection.isCollapsed && this.page.session && text?.contains(selection.anchorNode)
      && text.contains(selection.focusNode) && selection.toString().trim();
    this.bar.hidden = !isOurs;
    if (!isOurs) return;
    const { left, bottom } = selection.getRangeAt(0).getBoundingClientRect();
    this.bar.style.left = `${Math.max(8, Math.min(left, innerWidth - 170))}px`;
    this.bar.style.top = `${Math.max(8, Math.min(bottom + 8, innerHeight - 60))}px`;
  }

  async set(isPin) {
    const selection = getSelection();
    const range = selection.getRangeAt(0);
    const { viewed } = this.page; // another one may be open when the tokens have come
    const what = spanOf(range) ?? await this.page.view.selected(selection.toString().trim(), range);
    selection.removeAllRanges();
    await this.send(viewed, isPin, what);
  }

  /** Pins a token, or unpins it. */
  togglePin(position, isPinned) {
    return this.send(this.page.viewed, !isPinned, { start: position, end: position + 1 });
  }

  async send(name, isPin, what) {
    const done = await careful(() => (isPin ? api.pin : api.unpin)(name, what));
    if (!done) return;
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
