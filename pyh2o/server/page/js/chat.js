// The view of a conversation: its messages, and the actions on the last one.

import * as api from "./api.js";
import { splitMessage } from "./attachments.js";
import { Composer } from "./composer.js";
import { announce, askText, button, h, reportErrors, whileBusy } from "./dom.js";
import { generate, generating } from "./generation.js";
import { Message } from "./message.js";
import { PICTURE, toParts } from "./pictures.js";
import { maxTokens } from "./settings.js";
import { findTokens, textBefore } from "./tokens.js";

const NEAR_END = 80; // pixels: within this distance of the end, the view follows new text

export class Chat {
  constructor(page) {
    this.page = page;
    this.isShown = false;
    this.isBusy = false; // while a session is created or a turn is removed
    this.messages = [];
    this.composer = new Composer({ send: (message) => this.send(message), edit: () => this.editLast(),
      can: (ability) => page.models.can(ability) });
    this.log = h("div", { class: "log" });
    this.status = h("div", { class: "status", role: "status" });
    this.continueButton = button("Continue", () => this.answerAgain({ continue: true }));
    this.actions = h("div", { class: "turn-actions" },
      button("Regenerate", () => this.answerAgain({ regenerate: true })),
      button("Edit", () => this.editLast()), this.continueButton,
      button("Undo", () => this.undo()));
    this.empty = welcome((message) => this.send(message));
    this.scroller = h("div", { class: "scroller", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Messages" },
      this.empty, this.log, this.actions);
    const { composer } = this;
    this.element = h("div", { class: "view chat", dragover: (event) => event.preventDefault(),
      drop: (event) => composer.onFiles(event, event.dataTransfer) }, this.scroller, this.status, this.composer.element);
  }

  /** Shows a session; null before the first message creates one. */
  show(session) {
    const turns = session?.turns_list ?? [];
    const last = turns.at(-1)?.user;
    const before = this.session?.turns_list ?? [];
    if (!this.isShown) this.composer.open(session?.id ?? null, last);
    else if (turns.length !== before.length || last !== before.at(-1)?.user) this.composer.removeDelivered(last);
    this.isShown = true;
    this.session = session;
    const fromEnd = this.distanceFromEnd();
    // Unchanged turns keep their elements, and so the scroll position.
    turns.forEach((turn, n) => {
      const message = this.messages[n];
      if (!message) this.add(turn);
      else if (!message.shows(turn)) message.set(turn);
      else message.turn = turn;
    });
    for (const removed of this.messages.splice(turns.length)) removed.element.remove();
    this.empty.hidden = turns.length > 0;
    this.actions.hidden = turns.length === 0;
    this.continueButton.hidden = !this.messages.at(-1)?.canContinue;
    if (fromEnd < NEAR_END) this.scrollToEnd();
    this.status.textContent = session?.usable === false ? session.why : "";
  }

  focus() {
    this.composer.box.focus();
  }

  add(turn) {
    const message = new Message(turn, { choose: (attempt) => this.chooseAttempt(attempt), session: () => this.session?.id });
    this.messages.push(message);
    this.log.append(message.element);
    return message;
  }

  distanceFromEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight;
  }

  scrollToEnd() {
    const scroll = () => { this.scroller.scrollTop = this.scroller.scrollHeight; };
    scroll();
    // Elements get their final size only once they are visible.
    requestAnimationFrame(() => requestAnimationFrame(scroll));
  }

  async send(text) {
    if (generating() || this.isBusy) return;
    const before = this.messages.length;
    this.composer.send(text);
    const message = this.addUnanswered(text);
    if (!this.session) {
      this.status.textContent = `Opening ${this.page.newSession.model}`; // the model may have to be loaded
      const first = splitMessage(text).text || text.replace(PICTURE, "");
      const created = await whileBusy(this, () => this.page.create(this, { kind: "conversation", first }));
      this.status.textContent = "";
      if (!created) {
        this.messages.pop().element.remove();
        this.empty.hidden = false;
        return this.composer.settle(false);
      }
      this.session = created;
      this.composer.moveTo(created.id);
    }
    const turns = await this.answer({ message: toParts(text) }, message);
    // A message that was refused, or stopped before the first word, returns to the box.
    this.composer.settle(turns.length > before);
  }

  /** Shows a message before its answer starts. */
  addUnanswered(user) {
    const message = this.add({ user, answer: "", finish: "", attempt: 0, attempts: [0], start: 0, answer_start: 0, end: 0 });
    this.startAnswer(message);
    return message;
  }

  startAnswer(message, isContinued = false) {
    message.startAnswer(isContinued);
    this.empty.hidden = this.actions.hidden = true;
    this.scrollToEnd();
  }

  /** Regenerates or continues the last answer. */
  answerAgain(request) {
    const message = this.messages.at(-1);
    if (generating() || !message) return undefined;
    this.startAnswer(message, Boolean(request.continue));
    return this.answer(request, message);
  }

  /** Requests an answer; returns the session's turns after it, as far as they are known. */
  async answer(request, message) {
    const { id } = this.session;
    const done = await generate(id, "answers", { ...request, ...maxTokens() }, {
      status: this.status,
      onText: (text) => {
        const isAtEnd = this.distanceFromEnd() < NEAR_END;
        message.append(text);
        if (isAtEnd) requestAnimationFrame(() => this.scrollToEnd());
      },
      onReasoning: (text) => message.reasoning.append(text),
      onKv: (kv) => this.page.memory.onKv(id, kv),
    });
    message.markdown?.show();
    message.endAnswer(done);
    // The message gets its positions only with the session: a map before that would belong to the previous answer.
    // If the result is unknown, the previous state is shown.
    const session = await this.page.reload(id);
    if (!session) this.show(this.session);
    this.page.memory.afterAnswer(id);
    return (session ?? this.session).turns_list;
  }

  /** Restores another attempt as the last answer. */
  async chooseAttempt(attempt) {
    if (generating()) return;
    const { id } = this.session;
    const session = await reportErrors(() => api.change(id, { attempt }));
    // If a message was sent in the meantime, the view updates after its answer.
    if (!session || generating() || this.page.shownId !== id) return;
    const { attempts } = session.turns_list.at(-1);
    const { footer } = this.messages.at(-1);
    const { activeElement } = document;
    const label = footer.contains(activeElement) && activeElement.getAttribute("aria-label");
    this.show(session);
    // Focus the same button again, or the other one at the first and the last attempt.
    const buttons = [...footer.querySelectorAll(".attempts button:enabled")];
    if (label) (buttons.find((each) => each.getAttribute("aria-label") === label) ?? buttons[0]).focus();
    announce(`Answer ${attempts.indexOf(attempt) + 1} of ${attempts.length}`);
    this.page.setSession(session);
    this.page.memory.afterAnswer(id);
  }

  /** Edits the last message and answers it again. */
  async editLast() {
    const last = this.messages.at(-1);
    if (!last || generating()) return;
    // The dialog hides the picture markers, and the message keeps them.
    const words = await askText("Edit the last message", "Message", last.turn.user.replace(PICTURE, ""), "area");
    if (!words) return;
    const text = (last.turn.user.match(PICTURE) ?? []).map((marker) => `${marker.trim()}\n`).join("") + words;
    this.composer.hold(text);
    // While the dialog was open, another session may have been opened or a message sent.
    const canStart = this.page.view === this && !generating() && !this.isBusy
      && await whileBusy(this, () => this.page.isCurrent(this.session));
    if (canStart) this.messages.pop().element.remove();
    const turns = canStart ? await this.answer({ edit: text }, this.addUnanswered(text)) : [];
    this.composer.settle(turns.at(-1)?.user === text);
  }

  async undo() {
    if (generating() || this.isBusy) return;
    let isHeld = false;
    const session = await whileBusy(this, async () => {
      if (!await this.page.isCurrent(this.session)) return null;
      isHeld = !this.composer.message;
      // Hold the message before the request, so that it survives a reload of the page.
      if (isHeld) this.composer.hold(this.messages.at(-1).turn.user);
      return api.undo(this.session.id);
    });
    if (!session) return;
    if (isHeld) this.composer.settle(false);
    await this.page.refresh(session);
    announce("The last message and its answer were removed.");
  }

  /** Scrolls to a token, approximately if its element is not known. */
  showPosition(position) {
    const message = this.messages.findLast(({ turn }) => turn.start <= position) ?? this.messages[0];
    if (!message) return;
    const token = message.element.querySelector(`[data-p="${position}"]`);
    if (token) return token.scrollIntoView({ block: "center" });
    const { turn, element } = message;
    const fraction = (position - turn.start) / Math.max(1, turn.end - turn.start);
    const middle = element.offsetTop + fraction * element.offsetHeight - this.scroller.clientHeight / 2;
    this.scroller.scrollTop = middle;
    element.classList.add("highlighted");
    setTimeout(() => element.classList.remove("highlighted"), 1500);
  }

  /** The first and the last visible position. */
  visibleSpan() {
    const top = this.scroller.scrollTop;
    const positionAt = (y) => {
      const message = this.messages.findLast(({ element }) => element.offsetTop <= y) ?? this.messages[0];
      if (!message) return 0;
      const { turn, element } = message;
      const fraction = Math.min(1, Math.max(0, (y - element.offsetTop) / Math.max(1, element.offsetHeight)));
      return turn.start + fraction * (turn.end - turn.start);
    };
    return [positionAt(top), positionAt(top + this.scroller.clientHeight)];
  }

  /** The parts of the text that can be shaded (see shading.js). */
  shadableParts() {
    // The tokens of an answer in progress are not known yet.
    return this.messages.filter(({ markdown }) => !markdown).flatMap((message) => {
      const { user, start, answer_start: middle, end } = message.turn;
      const restore = () => message.set(message.turn);
      return [{ element: message.userMessage, span: [start, middle], text: user.replace(PICTURE, ""), restore },
        { element: message.answer, span: [middle, end], text: message.turn.answer, restore }];
    });
  }

  /** The tokens of a selection; null if it is not within one message or answer. */
  async selectedTokens(text, range) {
    const part = this.shadableParts().find(({ element }) =>
      element.contains(range.startContainer) && element.contains(range.endContainer));
    if (!part) return null;
    const before = textBefore(part.element, range);
    return findTokens(await this.page.memory.currentTokens().range(...part.span), text, before);
  }
}

// The empty chat: an introduction, and suggestions that a click sends.

const SUGGESTIONS = [
  ["Tell me a story", "Tell me a short story about a lighthouse keeper who finds an old map."],
  ["Explain something", "Explain why the sky is blue, in three sentences that a child understands."],
  ["Write some code", "Write a Python function that finds all prime numbers up to n, and say how it works."],
];

function welcome(send) {
  const items = SUGGESTIONS.map(([title, message]) =>
    h("li", {}, button(h("span", {}, h("strong", {}, title), " ", h("small", {}, message)), () => send(message))));
  return h("section", { class: "empty", "aria-labelledby": "welcome" },
    h("h2", { id: "welcome" }, "What would you like to talk about?"),
    h("p", {}, "A chat can be longer than the model's window: the tokens that the cache evicts go to an archive, and are retrieved when they are needed."),
    h("ul", { class: "suggestions", "aria-label": "Suggestions" }, ...items));
}
