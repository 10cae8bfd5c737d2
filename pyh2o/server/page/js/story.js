// The view of a story: one text, which the model continues from the end or from the cursor.

import * as api from "./api.js";
import { announce, ask, askToConfirm, button, formatNumber, h, reportErrors, whileBusy } from "./dom.js";
import { generate, generating, stop } from "./generation.js";
import { browserStorage, loadDraft, saveDraft } from "./storage.js";
import { Editor } from "./storyedit.js";
import { StoryText } from "./storytext.js";

const PASSAGE = "pyh2o-passage";
const DEFAULT_TOKENS = 200;
const NEAR_END = 120; // pixels
const REPETITION = "The passage was stopped because the story kept repeating itself.";
const START_DRAFT = "story"; // not an id of a session
const CONFIRMED_CUT = 400; // characters: longer cuts need a confirmation

export class Story {
  constructor(page) {
    this.page = page;
    this.isBusy = false; // while a session is created or changed
    this.textElement = h("div", { class: "story-text" });
    this.text = new StoryText(this.textElement);
    this.startBox = h("textarea", { class: "story-start", dir: "auto", "aria-label": "Start of the story",
      placeholder: "Once upon a time, in a town by the sea,",
      input: () => saveDraft(START_DRAFT, this.startBox.value), keydown: (event) => this.onKey(event) });
    this.welcome = h("section", { class: "empty" }, h("h2", {}, "How does the story start?"),
      h("p", {}, "Write a sentence or two, and the model continues. You can edit every word later."));
    this.scroller = h("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Story",
      keydown: (event) => this.onKey(event) }, this.welcome, this.startBox, this.textElement);
    this.cursor = new Cursor(this.text, this.scroller, () => this.showButtons());
    this.editor = new Editor(this.text, (change, before) => this.replace(change, before), () => this.showButtons());
    this.editButton = button("Edit", () => this.startEdit());
    this.doneButton = button("Done", () => this.editor.end(true), { class: "primary" });
    // Keep the focus in the text: when it leaves, the editor saves the changes.
    this.cancelButton = button("Cancel", () => this.editor.end(false), { pointerdown: (event) => event.preventDefault() });
    this.status = h("div", { class: "status", role: "status" });
    this.writeButton = button("Continue", () => this.write(), { class: "primary" });
    this.undoButton = button("Undo passage", () => this.undo());
    this.tokens = h("input", { type: "number", min: 1, step: 1, class: "passage-tokens", "aria-label": "Tokens per passage",
      value: browserStorage.get(PASSAGE) || DEFAULT_TOKENS, change: () => browserStorage.set(PASSAGE, this.tokens.value) });
    this.tokensLabel = h("label", { class: "muted" }, this.tokens, " tokens");
    this.element = h("div", { class: "view story" }, this.scroller,
      h("div", { class: "bar", role: "group", "aria-label": "Write" }, this.writeButton, button("Stop", stop, { class: "stop" }),
        this.tokensLabel, this.editButton, this.undoButton, this.doneButton, this.cancelButton, this.status));
  }

  show(session) {
    this.session = session;
    this.startBox.hidden = this.welcome.hidden = Boolean(session);
    if (!session && !this.startBox.value) this.startBox.value = loadDraft(START_DRAFT);
    this.textElement.hidden = !session;
    if (!this.editor.isOn) this.text.set(session?.text ?? "");
    this.status.textContent = session?.usable === false ? session.why : "";
    this.showButtons();
  }

  showButtons() {
    this.writeButton.textContent = !this.session ? "Write" : this.cursor.offset === null ? "Continue" : "Continue from the cursor";
    const { isOn } = this.editor;
    this.writeButton.hidden = this.tokensLabel.hidden = isOn;
    this.editButton.hidden = !this.session || isOn;
    this.undoButton.hidden = !this.session?.passages.length || isOn;
    this.doneButton.hidden = this.cancelButton.hidden = !isOn;
  }

  focus() {
    (this.session ? this.scroller : this.startBox).focus({ preventScroll: true });
    if (this.session) this.scrollToEnd();
  }

  /** Scrolls to the end of the text, without the empty space after it. */
  scrollToEnd() {
    const last = this.text.chunks.at(-1)?.element;
    last?.scrollIntoView({ block: "end" });
    // Chunks get their final height only once they are visible, which moves the end.
    requestAnimationFrame(() => last?.scrollIntoView({ block: "end" }));
  }

  onKey(event) {
    if (event.key === "Enter" && event.ctrlKey) {
      event.preventDefault();
      this.write();
    }
  }

  async write() {
    if (generating() || this.isBusy) return;
    if (!this.session) {
      const created = await whileBusy(this, () => this.page.create(this, { kind: "story", text: this.startBox.value }));
      if (!created) return;
      saveDraft(START_DRAFT, "");
      this.show(created);
    }
    const body = { max_tokens: Number(this.tokens.value) || DEFAULT_TOKENS };
    const { offset } = this.cursor;
    if (offset !== null) {
      if (!await whileBusy(this, () => this.mayCut(offset))) return;
      body.at = this.text.characterAt(offset);
      this.text.set(this.text.whole.slice(0, offset));
      this.cursor.set(null);
    }
    const { id } = this.session;
    this.scrollToEnd();
    const done = await generate(id, "passages", body, {
      status: this.status,
      onText: (text) => {
        const isAtEnd = this.isAtEnd();
        this.text.append(text);
        if (isAtEnd) requestAnimationFrame(() => this.scrollToEnd());
      },
      onKv: (kv) => this.page.memory.onKv(id, kv),
    });
    this.text.flush();
    // If the result is unknown, the previous text is shown: offsets in another text would be wrong.
    if (!await this.page.reload(id)) this.show(this.session);
    if (done?.finish === "repetition") this.status.textContent = REPETITION;
    this.page.memory.afterAnswer(id);
  }

  /** Whether the end is visible, so that the view follows new text. */
  isAtEnd() {
    const last = this.text.chunks.at(-1)?.element;
    if (!last) return true;
    return last.getBoundingClientRect().bottom < this.scroller.getBoundingClientRect().bottom + NEAR_END;
  }

  async mayCut(offset) {
    if (!await this.page.isCurrent({ ...this.session, text: this.text.whole })) return false;
    const cut = this.text.size - offset;
    if (cut <= CONFIRMED_CUT) return true;
    return askToConfirm("Delete the rest?", `${formatNumber(cut)} characters after the cursor are deleted, and the story continues from there.`, "Delete and continue");
  }

  async undo() {
    if (generating() || this.isBusy) return;
    const { id } = this.session;
    const session = await whileBusy(this, async () => await this.page.isCurrent({ ...this.session, text: this.text.whole }) && api.undo(id));
    if (!session) return;
    this.cursor.set(null);
    await this.page.refresh(session);
    announce("The last passage was removed.");
  }

  startEdit() {
    if (generating() || this.isBusy) return;
    const { offset } = this.cursor;
    this.page.memory.setShaded(false);
    this.editor.start(this.text.rangeAt(this.text.characterAt(offset ?? this.text.size))?.range);
    this.cursor.set(null);
  }

  /** Sends an edit of the text `before`. If that fails, shows the current text, and the user's words in a dialog. */
  async replace(change, before) {
    const { id } = this.session;
    const session = await whileBusy(this, async () => await this.page.isCurrent({ ...this.session, text: before }) && api.replace(id, change));
    if (session) {
      announce("The text was changed.");
      return this.page.refresh(session);
    }
    if (!await this.page.reload(id)) this.show(this.session);
    const words = h("textarea", { rows: 8, dir: "auto", readonly: true, value: change.text });
    await ask("The text was not changed", [h("label", { class: "field" }, "Your text, to copy", words)], "Close", { no: "" });
  }

  async showPosition(position) {
    const character = await reportErrors(() => this.page.memory.currentTokens().characterOf(position));
    const found = character === null ? null : this.text.rangeAt(character);
    if (!found) return;
    found.chunk.element.scrollIntoView({ block: "start" });
    // The chunk has a layout, and the range a position, only in the next frame.
    requestAnimationFrame(() => {
      const box = this.scroller.getBoundingClientRect();
      const { top } = found.range.getBoundingClientRect();
      this.scroller.scrollTop += top - box.top - box.height / 3;
      highlight(found.range);
    });
  }

  /** The first and the last visible position, approximately. */
  visibleSpan(tokens) {
    const { top, bottom } = this.scroller.getBoundingClientRect();
    const { chunks, size } = this.text;
    const positionAt = (y) => {
      const chunk = chunks.find(({ element }) => element.getBoundingClientRect().bottom >= y) ?? chunks.at(-1);
      if (!chunk) return 0;
      const box = chunk.element.getBoundingClientRect();
      const fraction = Math.min(1, Math.max(0, (y - box.top) / Math.max(1, box.height)));
      return (chunk.offset + fraction * chunk.text.length) / Math.max(1, size) * tokens;
    };
    return [positionAt(top), positionAt(bottom)];
  }

  /** The parts of the text that can be shaded (see shading.js). */
  shadableParts() {
    return this.text.chunks.map((chunk, n) => {
      const end = this.text.chunks[n + 1]?.character ?? this.text.nCharacters;
      return { element: chunk.element, chars: [chunk.character, end], text: chunk.text, restore: () => this.text.restore(chunk) };
    });
  }

  /** The tokens of a selection; null if it is not in the text. */
  async selectedTokens(text, range) {
    const offsets = [[range.startContainer, range.startOffset], [range.endContainer, range.endOffset]]
      .map(([node, offset]) => this.text.offsetOf(node, offset));
    if (offsets.includes(null)) return null;
    const tokens = this.page.memory.currentTokens();
    const [from, to] = offsets.map((offset) => this.text.characterAt(offset));
    return { start: await tokens.positionOf(from), end: await tokens.positionOf(Math.max(from, to - 1)) + 1 };
  }
}

/** Highlights the start of a range for a moment. */
function highlight(range) {
  if (!CSS.highlights) return;
  const shown = document.createRange();
  shown.setStart(range.startContainer, range.startOffset);
  const node = range.startContainer;
  shown.setEnd(node, Math.min(node.length ?? 0, range.startOffset + 40));
  CSS.highlights.set("target", new Highlight(shown));
  setTimeout(() => CSS.highlights.delete("target"), 1500);
}

const MOVES = { ArrowRight: ["forward", "word"], ArrowLeft: ["backward", "word"] };

/** The cursor of a story, set by a click or the arrow keys and removed by Esc. */
class Cursor {
  constructor(text, scroller, onChange) {
    this.text = text;
    this.scroller = scroller;
    this.onChange = onChange;
    this.offset = null; // null: the story continues from its end
    this.element = h("div", { class: "cursor", hidden: true });
    text.element.append(this.element);
    text.element.addEventListener("click", () => this.setFromSelection());
    scroller.addEventListener("keydown", (event) => this.onKey(event));
    const draw = () => this.draw();
    new ResizeObserver(draw).observe(text.element);
    // Chunks before the cursor get their final height only once they are visible.
    scroller.addEventListener("scroll", draw, { passive: true });
  }

  /** Sets the cursor where a click has left a collapsed selection. */
  setFromSelection() {
    const selection = getSelection();
    if (generating() || this.text.element.isContentEditable || !selection.isCollapsed || !selection.focusNode) return;
    const offset = this.text.offsetOf(selection.focusNode, selection.focusOffset);
    if (offset !== null) this.set(offset);
  }

  /** Sets the cursor; null or the end of the text removes it. */
  set(offset) {
    this.offset = offset === null || offset >= this.text.size ? null : offset;
    this.draw();
    this.onChange();
  }

  onKey(event) {
    if (event.key === "Escape" && this.offset !== null && !generating()) {
      event.stopPropagation();
      this.set(null);
    }
    const move = MOVES[event.key];
    if (!move || event.target !== this.scroller || event.ctrlKey || event.altKey || generating()) return;
    event.preventDefault();
    const selection = getSelection();
    const start = this.rangeAt(this.offset ?? this.text.size);
    if (!start) return;
    selection.collapse(start.startContainer, start.startOffset);
    selection.modify("move", ...move);
    this.setFromSelection();
    announce(this.offset === null ? "at the end" : `before: ${this.text.whole.slice(this.offset, this.offset + 40)}`);
  }

  rangeAt(offset) {
    return this.text.rangeAt(this.text.characterAt(offset))?.range;
  }

  draw() {
    const range = this.offset === null ? null : this.rangeAt(this.offset);
    this.element.hidden = !range;
    if (!range) return;
    const rect = range.getClientRects()[0] ?? range.getBoundingClientRect();
    const box = this.text.element.getBoundingClientRect();
    this.element.style.left = `${rect.left - box.left - 1}px`;
    this.element.style.top = `${rect.top - box.top}px`;
    this.element.style.height = `${rect.height || 24}px`;
  }
}
