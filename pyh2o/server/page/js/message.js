// A turn of a conversation on the page: what was said, what was thought, the answer.

import { shown } from "./attachments.js";
import { button, copyButton, counted, h, speed } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";

const ENDS = {
  length: "The answer was cut by its limit.",
  interrupted: "The answer was stopped.",
  repetition: "The answer was ended: it only repeated itself.",
  trained_context: "The model has no position left for more.",
};

export class Message {
  /** `choose` has another answer take the place of this one. */
  constructor(turn, choose) {
    this.choose = choose;
    this.said = h("div", { class: "said", dir: "auto" });
    this.thoughts = new Thoughts();
    this.calls = h("div", { class: "calls" });
    this.answer = h("div", { class: "answer md" });
    this.foot = h("p", { class: "foot" });
    this.element = h("article", { class: "turn" },
      h("h2", { class: "unseen" }, "You"), this.said,
      h("h2", { class: "unseen" }, "Answer"), this.thoughts.element, this.answer, this.calls, this.foot);
    this.set(turn);
  }

  /** Shows a turn as it is now. */
  set(turn) {
    this.turn = turn;
    this.markdown = null;
    this.said.replaceChildren(...shown(turn.user));
    const seen = this.seen?.attempt === turn.attempt ? this.seen : {};
    this.thoughts.set(turn.reasoning ?? seen.thoughts ?? "");
    this.calls.replaceChildren(...(turn.tool_calls ?? []).map(toolCall));
    showMarkdown(this.answer, turn.answer);
    this.element.classList.toggle("huge", turn.answer.length > 100_000);
    const copy = turn.answer ? copyButton(turn.answer, { class: "small quiet" }) : "";
    const pace = seen.perSecond ? h("span", {}, speed(seen.perSecond)) : "";
    this.foot.replaceChildren(this.chooser(), h("span", {}, ENDS[turn.finish] ?? ""), copy, pace);
  }

  /** Whether this is shown already: not where an answer was begun that never came. */
  isLike({ user, answer, finish, attempt, attempts }) {
    const { turn } = this;
    return !this.markdown && turn.user === user && turn.answer === answer && turn.finish === finish
      && turn.attempt === attempt && String(turn.attempts) === String(attempts);
  }

  /** Begins an answer, or goes on with the one that is there. */
  begin(keep) {
    this.answer.replaceChildren();
    if (!keep) this.thoughts.set("");
    if (!keep) this.calls.replaceChildren();
    this.markdown = new Markdown(this.answer);
    if (keep) this.markdown.append(this.turn.answer);
    this.foot.replaceChildren();
  }

  /** Adds to the answer. */
  append(text) {
    this.thoughts.end();
    this.markdown.append(text);
  }

  /** Keeps what is known only of an answer that was seen to be made; `done` is its last event. */
  ended(done) {
    this.seen = { attempt: done?.turn?.attempt, perSecond: done?.tokens_per_second, thoughts: this.thoughts.shown };
  }

  /** Whether there may be more to say. */
  get canGoOn() {
    return ["length", "interrupted", "repetition"].includes(this.turn.finish);
  }

  /** Which of its answers this is, and the way to the others; nothing where there is one. */
  chooser() {
    const { attempt, attempts } = this.turn;
    if (attempts.length < 2) return "";
    const at = attempts.indexOf(attempt);
    const to = (n, sign, label) => button(sign, () => this.choose(attempts[n]),
      { class: "small quiet", "aria-label": label, disabled: attempts[n] === undefined });
    return h("span", { class: "attempts", role: "group", "aria-label": "Answers" },
      to(at - 1, "‹", "Earlier answer"), `${at + 1} of ${attempts.length}`, to(at + 1, "›", "Later answer"));
  }
}

// What a model thinks before it answers: a line that opens.

class Thoughts {
  constructor() {
    this.title = h("summary");
    this.text = h("div", { class: "md" });
    this.element = h("details", { class: "thoughts", hidden: true }, this.title, this.text);
    this.markdown = null;
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
      this.begun = performance.now();
      this.shown = "";
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

/** A call of a tool: its name and its arguments, which are JSON. */
function toolCall({ name, arguments: given }) {
  let shown = given;
  try { shown = JSON.stringify(JSON.parse(given), null, 2); } catch { /* as it is */ }
  return h("div", { class: "call", role: "group", "aria-label": `Call of ${name}` },
    h("strong", {}, name), h("pre", { tabindex: 0 }, h("code", {}, shown)));
}
