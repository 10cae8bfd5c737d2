// A turn of a conversation on the page: what was said, and the answer.

import { copyButton } from "./copy.js";
import { button, h } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";

const ENDS = {
  length: "The answer was cut by its limit.",
  interrupted: "The answer was stopped.",
  repetition: "The answer was ended: it only repeated itself.",
  trained_context: "The model has no position left for more.",
};

export class Message {
  /**
   * @param {import("./api.js").Turn} turn
   * @param {(attempt: number) => void} choose has another answer take the place of this one
   */
  constructor(turn, choose) {
    this.choose = choose;
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
  isLike({ user, answer, finish, attempt, attempts }) {
    const { turn } = this;
    return !this.markdown && turn.user === user && turn.answer === answer && turn.finish === finish
      && turn.attempt === attempt && String(turn.attempts) === String(attempts);
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
    const { finish, answer } = this.turn;
    const copy = answer ? copyButton(answer, { class: "small quiet" }) : "";
    this.foot.replaceChildren(this.swipe(), h("span", {}, ENDS[finish] ?? ""), copy);
  }

  /** Which of its answers this is, and the way to the others; nothing where there is one. */
  swipe() {
    const { attempt, attempts } = this.turn;
    if (attempts.length < 2) return "";
    const at = attempts.indexOf(attempt);
    const to = (n, sign, label) => button(sign, () => this.choose(attempts[n]),
      { class: "small quiet", "aria-label": label, disabled: attempts[n] === undefined });
    return h("span", { class: "swipe", role: "group", "aria-label": "Answers" },
      to(at - 1, "‹", "Earlier answer"), `${at + 1} of ${attempts.length}`, to(at + 1, "›", "Later answer"));
  }
}
