// A turn of a conversation on the page: what was said, what was thought, the answer.

import { shown } from "./attachments.js";
import { button, copyButton, h, speed } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";
import { Thoughts, toldApart } from "./thoughts.js";

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
    const { thought, said } = toldApart(turn.answer);
    this.content = said;
    this.thoughts.set(turn.thoughts || seen.thoughts || thought);
    const calls = [...turn.steps ?? [], turn].flatMap((step) => step.calls ?? []);
    this.calls.replaceChildren(...calls.map(toolCall));
    showMarkdown(this.answer, said);
    this.element.classList.toggle("huge", turn.answer.length > 100_000);
    const copy = said ? copyButton(said, { class: "small quiet" }) : "";
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
    if (!keep) this.thoughts.set("");
    this.thoughts.begun = null;
    if (!keep) this.calls.replaceChildren();
    this.text = "";
    this.show("");
    if (keep) this.append(this.turn.answer);
    this.foot.replaceChildren();
  }

  /** Adds to the answer. */
  append(text) {
    this.text += text;
    this.thoughts.begun ??= performance.now();
    // All marks of thoughts end with this sign.
    const now = text.includes(">") ? toldApart(this.text) : null;
    if (now && now.state !== this.state) {
      this.show(now.said, now.state);
      if (now.state === "thinking" || !this.thoughts.shown) this.thoughts.append(now.thought);
      if (now.state === "said") this.thoughts.end(now.thought);
    } else {
      (this.state === "thinking" ? this.thoughts : this.markdown).append(text);
    }
    if (this.state !== "thinking") this.thoughts.end();
  }

  /** Begins to show an answer with what is said of it. */
  show(said, state = "") {
    this.state = state;
    this.answer.replaceChildren();
    this.markdown = new Markdown(this.answer);
    if (said) this.markdown.append(said);
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

/** A call of a tool: its name and its arguments, which are JSON. */
function toolCall({ name, arguments: given }) {
  let shown = given;
  try { shown = JSON.stringify(JSON.parse(given), null, 2); } catch { /* as it is */ }
  return h("div", { class: "call", role: "group", "aria-label": `Call of ${name}` },
    h("strong", {}, name), h("pre", { tabindex: 0 }, h("code", {}, shown)));
}
