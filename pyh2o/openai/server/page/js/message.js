// A turn of a conversation on the page: what was said, and the answer.

import { button, h } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";
import { careful } from "./live.js";

const ENDS = {
  length: "The answer was cut by its limit.",
  interrupted: "The answer was stopped.",
  repetition: "The answer was ended: it only repeated itself.",
  trained_context: "The model has no position left for more.",
};

export class Message {
  /** @param {import("./api.js").Turn} turn */
  constructor(turn) {
    this.said = h("div", { class: "said", dir: "auto" });
    this.answer = h("div", { class: "answer md" });
    this.foot = h("p", { class: "foot" });
    this.element = h("article", { class: "turn" },
      h("h2", { class: "unseen" }, "You"), this.said,
      h("h2", { class: "unseen" }, "Answer"), this.answer, this.foot);
    this.set(turn);
  }

  /** Shows a turn as it is now. */
  set(turn) {
    this.turn = turn;
    this.markdown = null;
    this.said.textContent = turn.user;
    showMarkdown(this.answer, turn.answer);
    this.element.classList.toggle("huge", turn.answer.length > 100_000);
    this.setFoot();
  }

  /** Whether this is shown already: not where an answer was begun that never came. */
  isLike({ user, answer, finish, attempt }) {
    const { turn } = this;
    return !this.markdown && turn.user === user && turn.answer === answer
      && turn.finish === finish && turn.attempt === attempt;
  }

  /** Begins an answer, or goes on with the one that is there. */
  begin(keep) {
    if (!keep) this.answer.replaceChildren();
    this.markdown = new Markdown(this.answer);
    if (keep) {
      this.answer.replaceChildren();
      this.markdown.append(this.turn.answer);
    }
    this.foot.replaceChildren();
  }

  /** Whether there may be more to say. */
  get canGoOn() {
    return ["length", "interrupted", "repetition"].includes(this.turn.finish);
  }

  append(text) {
    this.markdown.append(text);
  }

  setFoot() {
    const { finish, attempt, answer } = this.turn;
    const words = [];
    if (attempt) words.push(`Attempt ${attempt + 1}.`); // those before it are counted
    if (ENDS[finish]) words.push(ENDS[finish]);
    const copy = button("Copy", () => careful(async () => {
      await navigator.clipboard.writeText(answer);
      copy.textContent = "Copied";
    }), { class: "small quiet" });
    this.foot.replaceChildren(h("span", {}, words.join(" ")), answer ? copy : "");
  }
}
