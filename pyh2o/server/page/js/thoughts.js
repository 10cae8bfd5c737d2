// What a model thinks before it answers: a line that opens.

import { counted, h } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";

const CLOSING = "</think>";

/** What was thought and said in an answer whose text has marks of thoughts; the first mark may be the chat template's. */
export function toldApart(answer) {
  const begin = /^\s*<think>/.exec(answer)?.[0].length ?? 0;
  const end = begin ? answer.indexOf(CLOSING, begin) : answer.search(/^[ \t]*<\/think>/m);
  if (end < 0 && !begin) return { state: "", thought: "", said: answer };
  if (end < 0) return { state: "thinking", thought: answer.slice(begin).trimStart(), said: "" };
  const said = answer.slice(answer.indexOf(CLOSING, end) + CLOSING.length).trimStart();
  return { state: "said", thought: answer.slice(begin, end).trim(), said };
}

export class Thoughts {
  constructor() {
    this.title = h("summary");
    this.text = h("div", { class: "md" });
    this.element = h("details", { class: "thoughts", hidden: true }, this.title, this.text);
    this.markdown = null;
    this.begun = null; // when the first word came, thought or said
    this.shown = "";
  }

  /** Shows thoughts that have been had; how long they took is known only of those that were seen. */
  set(text) {
    this.end();
    if (this.shown === text) return;
    this.shown = text;
    this.element.hidden = !text;
    this.title.textContent = "Thoughts";
    showMarkdown(this.text, text);
  }

  append(text) {
    if (!this.markdown) {
      this.text.replaceChildren();
      this.markdown = new Markdown(this.text);
      this.begun ??= performance.now();
      this.shown = "";
      this.title.textContent = "Thinking…";
      this.element.hidden = false;
    }
    this.shown += text;
    this.markdown.append(text);
  }

  /** Ends them, perhaps with another text than came: part of a mark may have been taken for them. */
  end(text = this.shown) {
    if (!this.markdown) return;
    this.markdown.show();
    this.markdown = null;
    if (text !== this.shown) showMarkdown(this.text, text);
    this.shown = text;
    this.element.hidden = !text;
    this.title.textContent = `Thought for ${counted(Math.max(1, (performance.now() - this.begun) / 1000), "second")}`;
  }
}
