// A turn of a conversation on the page: what was said, what was thought, the answer.

import { shown } from "./attachments.js";
import { button, copyButton, h, speed } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";
import { Thoughts } from "./thoughts.js";

const ENDS = {
  length: "The answer was cut by its limit.",
  interrupted: "The answer was stopped.",
  repetition: "The answer was ended: it only repeated itself.",
  tool_calls: "The answer waits for the results of its calls.",
  trained_context: "The model has no position left for more.",
};

export class Message {
  /** `choose` has another answer take the place of this one; `session` tells the name of the session. */
  constructor(turn, { choose, session }) {
    this.choose = choose;
    this.session = session;
    this.said = h("div", { class: "said", dir: "auto" });
    this.thoughts = new Thoughts();
    this.steps = h("div");
    this.calls = h("div");
    this.answer = h("div", { class: "answer md" });
    this.foot = h("p", { class: "foot" });
    this.element = h("article", { class: "turn" },
      h("h2", { class: "unseen" }, "You"), this.said,
      h("h2", { class: "unseen" }, "Answer"), this.thoughts.element, this.steps, this.answer, this.calls, this.foot);
    this.set(turn);
  }

  /** Shows a turn as it is now. */
  set(turn) {
    this.turn = turn;
    this.markdown = null;
    this.said.replaceChildren(...shown(turn.user, this.session()));
    const { answer, steps = [], calls = [] } = turn;
    this.thoughts.set([...steps, turn].map((part) => part.reasoning).filter(Boolean).join("\n\n"));
    this.steps.replaceChildren(...steps.flatMap(({ text, calls: made }) => {
      const said = h("div", { class: "md" });
      showMarkdown(said, text);
      return [said, ...made.map(toolCall)];
    }));
    this.calls.replaceChildren(...calls.map(toolCall));
    showMarkdown(this.answer, answer);
    this.element.classList.toggle("huge", answer.length > 100_000);
    const copy = answer ? copyButton(answer, { class: "small quiet" }) : "";
    const perSecond = this.seen?.attempt === turn.attempt && this.seen.perSecond;
    const pace = perSecond ? h("span", {}, speed(perSecond)) : "";
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
    if (!keep) {
      this.thoughts.set("");
      this.steps.replaceChildren();
    }
    this.calls.replaceChildren();
    this.answer.replaceChildren();
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
    this.seen = { attempt: done?.turn?.attempt, perSecond: done?.tokens_per_second };
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

/** A call of a tool: its name, its arguments, which are JSON, and what came of it. */
function toolCall({ name, arguments: given, result }) {
  let shown = given;
  try { shown = JSON.stringify(JSON.parse(given), null, 2); } catch { /* as it is */ }
  return h("div", { class: "call", role: "group", "aria-label": `Call of ${name}` },
    h("strong", {}, name), h("pre", { tabindex: 0 }, h("code", {}, shown)), result && h("pre", { tabindex: 0 }, result));
}
