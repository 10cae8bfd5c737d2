// A story: the text is the page; it goes on from its end, or from the cursor, which a click or the arrow keys put.

import * as api from "./api.js";
import { alone, announce, ask, askWhether, button, careful, count, h } from "./dom.js";
import { make, stop, writing } from "./making.js";
import { ofBrowser, recall, remember } from "./storage.js";
import { Editor } from "./storyedit.js";
import { StoryText } from "./storytext.js";

const PASSAGE = "pyh2o-passage";
const USUAL_TOKENS = 200;
const NEAR_END = 120; // pixels
const ROUND = "The passage was ended: the story fell into one loop after another.";
const BEGINNING = "/story"; // no session has such a name
const MUCH = 400; // characters: more are cut only after asking

export class Story {
  constructor(page) {
    this.page = page;
    this.isBusy = false; // a session is made, or a passage taken back
    this.paper = h("div", { class: "page-text" });
    this.text = new StoryText(this.paper);
    this.begin = h("textarea", { class: "begin", dir: "auto", "aria-label": "Beginning of the story",
      placeholder: "Once upon a time, in a town by the sea,",
      input: () => remember(BEGINNING, this.begin.value), keydown: (event) => this.onKey(event) });
    this.welcome = h("section", { class: "empty" }, h("h2", {}, "How does it begin?"),
      h("p", {}, "Write a sentence or two: the model goes on from there. Any word can be changed later."));
    this.scroller = h("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Story",
      keydown: (event) => this.onKey(event) }, this.welcome, this.begin, this.paper);
    this.caret = new Caret(this.text, this.scroller, () => this.showButtons());
    this.editor = new Editor(this.text, (what, before) => this.replace(what, before), () => this.showButtons());
    this.edit = button("Edit", () => this.beginEdit());
    this.done = button("Done", () => this.editor.end(true), { class: "primary" });
    // Else the focus would leave the text, which keeps what was changed.
    this.cancel = button("Cancel", () => this.editor.end(false), { pointerdown: (event) => event.preventDefault() });
    this.status = h("div", { class: "reading", role: "status" });
    this.go = button("Write on", () => this.write(), { class: "primary" });
    this.back = button("Undo passage", () => this.undo());
    this.tokens = h("input", { type: "number", min: 1, step: 1, class: "tokens-wanted", "aria-label": "Tokens of a passage",
      value: ofBrowser.get(PASSAGE) || USUAL_TOKENS, change: () => ofBrowser.set(PASSAGE, this.tokens.value) });
    this.wanted = h("label", { class: "quiet" }, this.tokens, " tokens");
    this.element = h("div", { class: "view story" }, this.scroller,
      h("div", { class: "bar", role: "group", "aria-label": "Write" }, this.go,
        button("Stop", stop, { class: "stop" }), this.wanted, this.edit, this.back, this.done, this.cancel, this.status));
  }

  show(session) {
    this.session = session;
    this.begin.hidden = this.welcome.hidden = Boolean(session);
    if (!session && !this.begin.value) this.begin.value = recall(BEGINNING);
    this.paper.hidden = !session;
    if (!this.editor.isOn) this.text.set(session?.text ?? "");
    this.status.textContent = session?.usable === false ? session.why : "";
    this.showButtons();
  }

  showButtons() {
    this.go.textContent = !this.session ? "Write" : this.caret.place === null ? "Write on" : "Write on from the cursor";
    const { isOn } = this.editor;
    this.go.hidden = this.wanted.hidden = isOn;
    this.edit.hidden = !this.session || isOn;
    this.back.hidden = !this.session?.passages.length || isOn;
    this.done.hidden = this.cancel.hidden = !isOn;
  }

  focus() {
    (this.session ? this.scroller : this.begin).focus({ preventScroll: true });
    if (this.session) this.toEnd();
  }

  /** Shows the end of the text, without the empty page behind it. */
  toEnd() {
    const last = this.text.chunks.at(-1)?.element;
    last?.scrollIntoView({ block: "end" });
    // What comes into sight gets its true height, and moves the end.
    requestAnimationFrame(() => last?.scrollIntoView({ block: "end" }));
  }

  onKey(event) {
    if (event.key === "Enter" && event.ctrlKey) {
      event.preventDefault();
      this.write();
    }
  }

  async write() {
    if (writing() || this.isBusy) return;
    if (!this.session) {
      const created = await alone(this, () => this.page.create(this, { kind: "story", text: this.begin.value }));
      if (!created) return;
      remember(BEGINNING, "");
      this.show(created);
    }
    const body = { max_tokens: Number(this.tokens.value) || USUAL_TOKENS };
    const { place } = this.caret;
    if (place !== null) {
      if (!await alone(this, () => this.mayCut(place))) return;
      body.at = this.text.characterAt(place);
      this.text.set(this.text.whole.slice(0, place));
      this.caret.put(null);
    }
    const { name } = this.session;
    this.toEnd();
    const done = await make(name, "passages", body, {
      status: this.status,
      onText: (text) => {
        const isFollowed = this.isAtEnd();
        this.text.append(text);
        if (isFollowed) requestAnimationFrame(() => this.toEnd());
      },
      onKv: (kv) => this.page.memory.onKv(name, kv),
    });
    this.text.flush();
    // Where nobody knows what became of it, the text as it was is shown: places in another one would be wrong.
    if (!await this.page.reload(name)) this.show(this.session);
    if (done?.finish === "repetition") this.status.textContent = ROUND;
    this.page.memory.afterAnswer(name);
  }

  /** Whether who reads is at the end, and is taken along. */
  isAtEnd() {
    const last = this.text.chunks.at(-1)?.element;
    if (!last) return true;
    return last.getBoundingClientRect().bottom < this.scroller.getBoundingClientRect().bottom + NEAR_END;
  }

  async mayCut(place) {
    if (!await this.page.isCurrent({ ...this.session, text: this.text.whole })) return false;
    const behind = this.text.size - place;
    if (behind <= MUCH) return true;
    return askWhether("Cut the rest?", `${count(behind)} characters behind the cursor are taken away, and the story goes on from there.`, "Cut and write on");
  }

  async undo() {
    if (writing() || this.isBusy) return;
    const { name } = this.session;
    const session = await alone(this, async () => await this.page.isCurrent({ ...this.session, text: this.text.whole }) && api.undo(name));
    if (!session) return;
    this.caret.put(null);
    await this.page.renew(session);
    announce("The last passage was taken back.");
  }

  beginEdit() {
    if (writing() || this.isBusy) return;
    const { place } = this.caret;
    this.page.memory.setShaded(false);
    this.editor.begin(this.text.rangeAt(this.text.characterAt(place ?? this.text.size))?.range);
    this.caret.put(null);
  }

  /** Has the server put other words into the text that was `before`; where it cannot, they are shown, and the text as it is. */
  async replace(what, before) {
    const { name } = this.session;
    const session = await alone(this, async () => await this.page.isCurrent({ ...this.session, text: before }) && api.replace(name, what));
    if (session) {
      announce("The text was changed.");
      return this.page.renew(session);
    }
    if (!await this.page.reload(name)) this.show(this.session);
    const words = h("textarea", { rows: 8, dir: "auto", readonly: true, value: what.text });
    await ask("The text was not changed", [h("label", { class: "field" }, "Your words, to be copied", words)], "Close", { no: "" });
  }

  async showPosition(position) {
    const character = await careful(() => this.page.memory.tokensNow().offsetOf(position));
    const found = character === null ? null : this.text.rangeAt(character);
    if (!found) return;
    found.chunk.element.scrollIntoView({ block: "start" });
    // Only now the chunk is laid out, and the place in it known.
    requestAnimationFrame(() => {
      const box = this.scroller.getBoundingClientRect();
      const { top } = found.range.getBoundingClientRect();
      this.scroller.scrollTop += top - box.top - box.height / 3;
      flash(found.range);
    });
  }

  visibleSpan(tokens) {
    const { top, bottom } = this.scroller.getBoundingClientRect();
    const at = (y) => {
      const chunk = this.chunkAt(y);
      if (!chunk) return 0;
      const box = chunk.element.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (y - box.top) / Math.max(1, box.height)));
      return (chunk.start + part * chunk.text.length) / Math.max(1, this.text.size) * tokens;
    };
    return [at(top), at(bottom)];
  }

  /** The chunk at a height of the screen. */
  chunkAt(y) {
    const { chunks } = this.text;
    return chunks.find(({ element }) => element.getBoundingClientRect().bottom >= y) ?? chunks.at(-1);
  }

  shadable() {
    return this.text.chunks.map((chunk, n) => {
      const end = this.text.chunks[n + 1]?.from ?? this.text.length;
      return { element: chunk.element, chars: [chunk.from, end], text: chunk.text, back: () => this.text.back(chunk) };
    });
  }

  /** The tokens of a selection; null if it is not in the text. */
  async selected(text, range) {
    const places = [[range.startContainer, range.startOffset], [range.endContainer, range.endOffset]]
      .map(([node, offset]) => this.text.placeOf(node, offset));
    if (places.includes(null)) return null;
    const tokens = this.page.memory.tokensNow();
    const [from, to] = places.map((place) => this.text.characterAt(place));
    return { start: await tokens.positionOf(from), end: await tokens.positionOf(Math.max(from, to - 1)) + 1 };
  }
}

/** Shows a place for a moment. */
function flash(range) {
  if (!CSS.highlights) return;
  const shown = document.createRange();
  shown.setStart(range.startContainer, range.startOffset);
  const node = range.startContainer;
  shown.setEnd(node, Math.min(node.length ?? 0, range.startOffset + 40));
  CSS.highlights.set("found", new Highlight(shown));
  setTimeout(() => CSS.highlights.delete("found"), 1500);
}

// The cursor of a story: a click or the arrow keys put it between two words, Esc takes it away.

const MOVES = { ArrowRight: ["forward", "word"], ArrowLeft: ["backward", "word"] };

class Caret {
  constructor(text, scroller, onChange) {
    this.text = text;
    this.scroller = scroller;
    this.onChange = onChange;
    this.place = null; // null: the story goes on from its end
    this.element = h("div", { class: "caret", hidden: true });
    text.element.append(this.element);
    text.element.addEventListener("click", () => this.fromSelection());
    scroller.addEventListener("keydown", (event) => this.onKey(event));
    const redraw = () => this.draw();
    new ResizeObserver(redraw).observe(text.element);
    // Chunks in front get their true heights when they come into sight.
    scroller.addEventListener("scroll", redraw, { passive: true });
  }

  /** The collapsed selection that a click leaves says where it was. */
  fromSelection() {
    const selection = getSelection();
    if (writing() || this.text.element.isContentEditable || !selection.isCollapsed || !selection.focusNode) return;
    const place = this.text.placeOf(selection.focusNode, selection.focusOffset);
    if (place !== null) this.put(place);
  }

  /** Moves it; null takes it away, and so does the end of the text. */
  put(place) {
    this.place = place === null || place >= this.text.size ? null : place;
    this.draw();
    this.onChange();
  }

  onKey(event) {
    if (event.key === "Escape" && this.place !== null && !writing()) {
      event.stopPropagation();
      this.put(null);
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
    announce(this.place === null ? "at the end" : `before: ${this.text.whole.slice(this.place, this.place + 40)}`);
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
}
