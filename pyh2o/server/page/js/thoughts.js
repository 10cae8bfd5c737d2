// What a model thinks before it answers: a line that opens.

import { counted, h } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";

export class Thoughts {
  constructor() {
    this.title = h("summary");
    this.text = h("div", { class: "md" });
    this.element = h("details", { class: "thoughts", hidden: true }, this.title, this.text);
    this.markdown = null;
    this.begun = 0;
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
      this.markdown.append(this.shown); // of an answer that goes on
      this.begun = performance.now();
      this.title.textContent = "Thinking…";
      this.element.hidden = false;
    }
    this.shown += text;
    this.markdown.append(text);
  }

  end() {
    if (!this.markdown) return;
    this.markdown.show();
    this.markdown = null;
    this.title.textContent = `Thought for ${counted(Math.max(1, (performance.now() - this.begun) / 1000), "second")}`;
  }
}
