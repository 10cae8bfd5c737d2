// The reasoning before an answer, folded into one line.

import { h, plural } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";

export class Reasoning {
  constructor() {
    this.title = h("summary");
    this.text = h("div", { class: "md" });
    this.element = h("details", { class: "reasoning", hidden: true }, this.title, this.text);
    this.markdown = null;
    this.startedAt = 0;
    this.shown = "";
  }

  /** Shows finished reasoning. If this text was streamed before, its duration stays. */
  set(text) {
    this.end();
    if (this.shown === text) return;
    this.shown = text;
    this.element.hidden = !text;
    this.title.textContent = "Reasoning";
    showMarkdown(this.text, text);
  }

  append(text) {
    if (!this.markdown) {
      this.text.replaceChildren();
      this.markdown = new Markdown(this.text);
      this.markdown.append(this.shown); // of a continued answer
      this.startedAt = performance.now();
      this.title.textContent = "Reasoning…";
      this.element.hidden = false;
    }
    this.shown += text;
    this.markdown.append(text);
  }

  end() {
    if (!this.markdown) return;
    this.markdown.show();
    this.markdown = null;
    this.title.textContent = `Reasoned for ${plural(Math.max(1, (performance.now() - this.startedAt) / 1000), "second")}`;
  }
}
