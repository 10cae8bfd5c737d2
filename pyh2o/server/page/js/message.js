// A turn of a conversation: the user's message, the reasoning, tool calls, the answer.

import { messageContent } from "./attachments.js";
import { button, copyButton, formatSpeed, h } from "./dom.js";
import { Markdown, showMarkdown } from "./markdown.js";
import { Reasoning } from "./reasoning.js";

const FINISH = {
  length: "Stopped at the token limit.",
  interrupted: "Stopped.",
  repetition: "Stopped because it repeated itself.",
  tool_calls: "Waiting for the results of the tool calls.",
  trained_context: "Stopped at the end of the model's context.",
};

export class Message {
  /** `choose` restores another attempt; `session` returns the session's id. */
  constructor(turn, { choose, session }) {
    this.choose = choose;
    this.session = session;
    this.userMessage = h("div", { class: "user-message", dir: "auto" });
    this.reasoning = new Reasoning();
    this.steps = h("div");
    this.calls = h("div");
    this.answer = h("div", { class: "answer md" });
    this.footer = h("p", { class: "footer" });
    this.element = h("article", { class: "turn" },
      h("h2", { class: "visually-hidden" }, "You"), this.userMessage,
      h("h2", { class: "visually-hidden" }, "Answer"), this.reasoning.element, this.steps, this.answer, this.calls, this.footer);
    this.set(turn);
  }

  /** Shows the new state of a turn. */
  set(turn) {
    this.turn = turn;
    this.markdown = null;
    this.userMessage.replaceChildren(...messageContent(turn.user, this.session()));
    const { answer, steps = [], calls = [] } = turn;
    this.reasoning.set([...steps, turn].map((part) => part.reasoning).filter(Boolean).join("\n\n"));
    this.steps.replaceChildren(...steps.flatMap(({ text, calls: stepCalls }) => {
      const element = h("div", { class: "md" });
      showMarkdown(element, text);
      return [element, ...stepCalls.map(toolCall)];
    }));
    this.calls.replaceChildren(...calls.map(toolCall));
    showMarkdown(this.answer, answer);
    this.element.classList.toggle("huge", answer.length > 100_000);
    const copy = answer ? copyButton(answer, { class: "small muted" }) : "";
    const perSecond = this.measured?.attempt === turn.attempt && this.measured.perSecond;
    const speed = perSecond ? h("span", {}, formatSpeed(perSecond)) : "";
    this.footer.replaceChildren(this.attemptButtons(), h("span", {}, FINISH[turn.finish] ?? ""), copy, speed);
  }

  /** Whether it shows this turn already; false after an answer that failed. */
  shows({ user, answer, finish, attempt, attempts }) {
    const { turn } = this;
    return !this.markdown && turn.user === user && turn.answer === answer && turn.finish === finish
      && turn.attempt === attempt && String(turn.attempts) === String(attempts);
  }

  /** Prepares for a new answer, or for more of the current one. */
  startAnswer(isContinued) {
    if (!isContinued) {
      this.reasoning.set("");
      this.steps.replaceChildren();
    }
    this.calls.replaceChildren();
    this.answer.replaceChildren();
    this.markdown = new Markdown(this.answer);
    if (isContinued) this.markdown.append(this.turn.answer);
    this.footer.replaceChildren();
  }

  append(text) {
    this.reasoning.end();
    this.markdown.append(text);
  }

  /** Keeps the speed in the last event of an answer, which the session does not store. */
  endAnswer(done) {
    this.measured = { attempt: done?.turn?.attempt, perSecond: done?.tokens_per_second };
  }

  get canContinue() {
    return ["length", "interrupted", "repetition"].includes(this.turn.finish);
  }

  /** The number of this attempt between buttons to the previous and next one; empty if there is only one. */
  attemptButtons() {
    const { attempt, attempts } = this.turn;
    if (attempts.length < 2) return "";
    const at = attempts.indexOf(attempt);
    const to = (n, sign, label) => button(sign, () => this.choose(attempts[n]),
      { class: "small muted", "aria-label": label, disabled: attempts[n] === undefined });
    return h("span", { class: "attempts", role: "group", "aria-label": "Answers" },
      to(at - 1, "‹", "Previous answer"), `${at + 1} of ${attempts.length}`, to(at + 1, "›", "Next answer"));
  }
}

/** Shows a tool call: its name, its arguments (usually JSON) and its result. */
function toolCall({ name, arguments: json, result }) {
  let shown = json;
  try { shown = JSON.stringify(JSON.parse(json), null, 2); } catch { /* not JSON */ }
  return h("div", { class: "tool-call", role: "group", "aria-label": `Call of ${name}` },
    h("strong", {}, name), h("pre", { tabindex: 0 }, h("code", {}, shown)), result && h("pre", { tabindex: 0 }, result));
}
