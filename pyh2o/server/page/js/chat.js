// A conversation: its messages, and what can be done with the last one.

import * as api from "./api.js";
import { split } from "./attachments.js";
import { Composer } from "./composer.js";
import { alone, announce, askText, button, careful, h } from "./dom.js";
import { make, writing } from "./making.js";
import { Message } from "./message.js";
import { PICTURE, inParts, withData } from "./pictures.js";
import { maxTokens } from "./settings.js";
import { spanIn, textBefore } from "./tokens.js";

const NEAR_END = 80; // pixels: who is nearer to the end is taken along with it

export class Chat {
  constructor(page) {
    this.page = page;
    this.isShown = false;
    this.isBusy = false; // a session is made, or a turn taken back
    this.messages = [];
    this.composer = new Composer({ send: (message) => this.send(message), edit: () => this.editLast(),
      takes: (sense) => page.models.takes(sense) });
    this.log = h("div", { class: "log" });
    this.status = h("div", { class: "reading", role: "status" });
    this.more = button("Continue", () => this.again({ continue: true }));
    this.actions = h("div", { class: "turn-actions" },
      button("Regenerate", () => this.again({ regenerate: true })),
      button("Edit", () => this.editLast()), this.more,
      button("Undo", () => this.undo()));
    this.empty = welcome((message) => this.send(message));
    this.scroller = h("div", { class: "scroller", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Messages" },
      this.empty, this.log, this.actions);
    const { composer } = this;
    this.element = h("div", { class: "view chat", dragover: (event) => event.preventDefault(),
      drop: (event) => composer.onFiles(event, event.dataTransfer) }, this.scroller, this.status, this.composer.element);
  }

  /** Shows a session; null for one that begins with the first message. */
  show(session) {
    const turns = session?.turns_list ?? [];
    const last = turns.at(-1)?.user;
    const before = this.session?.turns_list ?? [];
    if (!this.isShown) this.composer.keepFor(session?.name ?? null, last);
    else if (turns.length !== before.length || last !== before.at(-1)?.user) this.composer.arrived(last);
    this.isShown = true;
    this.session = session;
    const fromEnd = this.distance();
    // Turns that are as they were keep their elements, and with them the place of who reads.
    turns.forEach((turn, n) => {
      const shown = this.messages[n];
      if (!shown) this.add(turn);
      else if (!shown.isLike(turn)) shown.set(turn);
      else shown.turn = turn;
    });
    for (const gone of this.messages.splice(turns.length)) gone.element.remove();
    this.empty.hidden = turns.length > 0;
    this.actions.hidden = turns.length === 0;
    this.more.hidden = !this.messages.at(-1)?.canGoOn;
    if (fromEnd < NEAR_END) this.toEnd();
    this.status.textContent = session?.usable === false ? session.why : "";
  }

  focus() {
    this.composer.box.focus();
  }

  add(turn) {
    const message = new Message(turn, { choose: (attempt) => this.choose(attempt), session: () => this.session?.name });
    this.messages.push(message);
    this.log.append(message.element);
    return message;
  }

  distance() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight;
  }

  toEnd() {
    const scroll = () => { this.scroller.scrollTop = this.scroller.scrollHeight; };
    scroll();
    // What comes into sight has its size only then.
    requestAnimationFrame(() => requestAnimationFrame(scroll));
  }

  async send(text) {
    if (writing() || this.isBusy) return;
    const before = this.messages.length;
    this.composer.send(text);
    const message = this.begin(text);
    if (!this.session) {
      this.status.textContent = `Opening ${this.page.draft.model}`; // which may have to be loaded
      const { text: said } = split(text);
      const first = said || text.replace(PICTURE, "");
      const created = await alone(this, () => this.page.create(this, { kind: "conversation", first }));
      this.status.textContent = "";
      if (!created) {
        this.messages.pop().element.remove();
        this.empty.hidden = false;
        return this.composer.settle(false);
      }
      this.session = created;
      this.composer.moveTo(created.name);
    }
    const turns = await this.answer({ message: inParts(text) }, message);
    // What was refused, or stopped before a word was said, is not lost.
    this.composer.settle(turns.length > before);
  }

  /** Shows a message that will be answered. */
  begin(user) {
    const message = this.add({ user, answer: "", finish: "", attempt: 0, attempts: [0], start: 0, answer_start: 0, end: 0 });
    this.open(message);
    return message;
  }

  /** Shows that an answer begins, or goes on. */
  open(message, goesOn = false) {
    message.begin(goesOn);
    this.empty.hidden = this.actions.hidden = true;
    this.toEnd();
  }

  /** Has the last answer made again, or gone on with. */
  again(what) {
    const message = this.messages.at(-1);
    if (writing() || !message) return undefined;
    this.open(message, Boolean(what.continue));
    return this.answer(what, message);
  }

  /** Has an answer made; the turns that the server has then, as far as that is known. */
  async answer(what, message) {
    const { name } = this.session;
    const done = await make(name, "answers", { ...what, ...maxTokens() }, {
      status: this.status,
      onText: (text) => {
        const isAtEnd = this.distance() < NEAR_END;
        message.append(text);
        if (isAtEnd) requestAnimationFrame(() => this.toEnd());
      },
      onThought: (text) => message.thoughts.append(text),
      onKv: (kv) => this.page.memory.onKv(name, kv),
    });
    message.markdown?.show();
    message.ended(done);
    // It is shown as a turn together with the session: a map that came in between would have the tokens of the one before.
    // Where nobody knows what became of it, what was there before is shown.
    const session = await this.page.reload(name);
    if (!session) this.show(this.session);
    this.page.memory.afterAnswer(name);
    return (session ?? this.session).turns_list;
  }

  /** Has an earlier or a later answer take the place of the last one. */
  async choose(attempt) {
    if (writing()) return;
    const { name } = this.session;
    const session = await careful(() => api.change(name, { attempt }));
    // A message that was sent meanwhile shows all anew when it is answered.
    if (!session || writing() || this.page.viewed !== name) return;
    const { attempts } = session.turns_list.at(-1);
    const { foot } = this.messages.at(-1);
    const { activeElement } = document;
    const label = foot.contains(activeElement) && activeElement.getAttribute("aria-label");
    this.show(session);
    // The button that was pressed can be pressed again; at the first and at the last answer the other one.
    const buttons = [...foot.querySelectorAll(".attempts button:enabled")];
    if (label) (buttons.find((each) => each.getAttribute("aria-label") === label) ?? buttons[0]).focus();
    announce(`Answer ${attempts.indexOf(attempt) + 1} of ${attempts.length}`);
    this.page.setSession(session);
    this.page.memory.afterAnswer(name);
  }

  /** Has the last message changed, and answered as it is then. */
  async editLast() {
    const last = this.messages.at(-1);
    if (!last || writing()) return;
    // Its pictures stay: their marks say nothing to people.
    const words = await askText("Change the last message", "Message", last.turn.user.replace(PICTURE, ""), "area");
    if (!words) return;
    const text = (last.turn.user.match(PICTURE) ?? []).map((mark) => `${mark.trim()}\n`).join("") + words;
    this.composer.hold(text);
    // Behind a question another session may be opened, or a message be sent.
    const canBegin = this.page.view === this && !writing() && !this.isBusy
      && await alone(this, () => this.page.isCurrent(this.session));
    if (canBegin) this.messages.pop().element.remove();
    const turns = canBegin ? await this.answer({ edit: text }, this.begin(text)) : [];
    this.composer.settle(turns.at(-1)?.user === text);
  }

  async undo() {
    if (writing() || this.isBusy) return;
    let isHeld = false;
    const session = await alone(this, async () => {
      if (!await this.page.isCurrent(this.session)) return null;
      isHeld = !this.composer.message;
      // A reload finds it, if that comes before the server's answer.
      // Its pictures leave the session with it.
      if (isHeld) this.composer.hold(await withData(this.session.name, this.messages.at(-1).turn.user));
      return api.undo(this.session.name);
    });
    if (!session) return;
    if (isHeld) this.composer.settle(false);
    await this.page.renew(session);
    announce("The last message and its answer were taken back.");
  }

  /** Scrolls to the place of a token, as well as that is known. */
  showPosition(position) {
    const message = this.messages.findLast(({ turn }) => turn.start <= position) ?? this.messages[0];
    if (!message) return;
    const token = message.element.querySelector(`[data-p="${position}"]`);
    if (token) return token.scrollIntoView({ block: "center" });
    const { turn, element } = message;
    const part = (position - turn.start) / Math.max(1, turn.end - turn.start);
    const middle = element.offsetTop + part * element.offsetHeight - this.scroller.clientHeight / 2;
    this.scroller.scrollTop = middle;
    element.classList.add("found");
    setTimeout(() => element.classList.remove("found"), 1500);
  }

  /** The positions that are in sight. */
  visibleSpan() {
    const top = this.scroller.scrollTop;
    const at = (y) => {
      const message = this.messages.findLast(({ element }) => element.offsetTop <= y) ?? this.messages[0];
      if (!message) return 0;
      const { turn, element } = message;
      const part = Math.min(1, Math.max(0, (y - element.offsetTop) / Math.max(1, element.offsetHeight)));
      return turn.start + part * (turn.end - turn.start);
    };
    return [at(top), at(top + this.scroller.clientHeight)];
  }

  /** What is shaded, piece by piece: an element, its tokens, and what brings it back. */
  shadable() {
    // Of an answer in the making nobody knows the tokens yet.
    return this.messages.filter(({ markdown }) => !markdown).flatMap((message) => {
      const { user, start, answer_start: middle, end } = message.turn;
      const back = () => message.set(message.turn);
      return [{ element: message.said, span: [start, middle], text: user.replace(PICTURE, ""), back },
        { element: message.answer, span: [middle, end], text: message.turn.answer, back }];
    });
  }

  /** The tokens of a selection; null if it is not in one message or answer. */
  async selected(text, range) {
    const piece = this.shadable().find(({ element }) =>
      element.contains(range.startContainer) && element.contains(range.endContainer));
    if (!piece) return null;
    const before = textBefore(piece.element, range);
    return spanIn(await this.page.memory.tokensNow().range(...piece.span), text, before);
  }
}

// What a chat begins with: what this is, and things to try, each sent with a click.

const TO_TRY = [
  ["Tell me a story", "Tell me a short story about a lighthouse keeper who finds an old map."],
  ["Explain something", "Explain why the sky is blue, in three sentences that a child understands."],
  ["Write some code", "Write a Python function that finds all prime numbers up to n, and say how it works."],
];

function welcome(send) {
  const items = TO_TRY.map(([title, message]) =>
    h("li", {}, button(h("span", {}, h("strong", {}, title), " ", h("small", {}, message)), () => send(message))));
  return h("section", { class: "empty", "aria-labelledby": "welcome" },
    h("h2", { id: "welcome" }, "What shall we talk about?"),
    h("p", {}, "A chat here has no end. What no longer fits into its cache goes to an archive, and comes back when it is asked for."),
    h("ul", { class: "to-try", "aria-label": "Things to try" }, ...items));
}
