// The box that messages are written in: keys, text files, and the buttons beside it.

import { button, careful, h } from "./dom.js";
import { stop } from "./making.js";
import { joined, moveDraft, recall, remember, without } from "./storage.js";

export class Composer {
  /** `uses` has send(message) and edit(). */
  constructor(uses) {
    this.uses = uses;
    this.sent = ""; // of which nobody knows yet whether the server has it
    this.returned = ""; // what came back into the box
    this.name = null; // of the session that it is for
    this.box = h("textarea", {
      rows: 1, dir: "auto", "aria-label": "Message", placeholder: "Write a message", autocomplete: "off",
      keydown: (event) => this.onKey(event), input: () => this.changed(),
    });
    this.picker = h("input", { type: "file", multiple: true, class: "unseen", tabindex: -1,
      "aria-label": "Text files", change: () => this.take([...this.picker.files]) });
    const row = h("div", { class: "box" },
      button("+", () => this.picker.click(), { class: "icon", "aria-label": "Add text files" }), this.box,
      h("button", { type: "submit", class: "primary send" }, "Send"),
      button("Stop", stop, { class: "stop send" }));
    this.element = h("form", {
      class: "composer", "aria-label": "Write a message",
      submit: (event) => { event.preventDefault(); this.submit(); },
    }, row, this.picker);
  }

  /** Keeps what is written for a session, and shows what was kept, unless its `last` message is that. */
  keepFor(name, last) {
    this.name = name;
    const kept = without(recall(name), last);
    if (!this.box.value) this.box.value = this.returned = kept; // the server may get to it yet
    this.changed();
  }

  /** The session that it is for has this name. */
  moveTo(name) {
    moveDraft(this.name, name);
    this.name = name;
  }

  /** Another message is the last one: if it had come back here, it is no draft. */
  arrived(last) {
    if (without(this.returned, last) === this.returned) return;
    this.returned = "";
    this.box.value = without(this.box.value, last);
    this.changed();
  }

  /** Puts the texts of files behind what is written. */
  async take(files) {
    this.picker.value = "";
    for (const file of files) {
      const text = await careful(() => readText(file));
      if (text) this.put(joined(this.box.value, text));
    }
  }

  onKey(event) {
    if (event.isComposing) return; // Enter ends what an input method composes
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.box.value) {
      event.preventDefault();
      this.uses.edit();
    }
  }

  submit() {
    const message = this.box.value.trim();
    if (message) this.uses.send(message);
  }

  put(message) {
    this.box.value = message;
    this.changed();
    this.box.focus();
  }

  /** Holds a message while it is sent; the box is free for the next one. */
  send(message) {
    this.returned = this.box.value = "";
    this.hold(message);
  }

  /** Keeps a message over a reload, until `settle`. */
  hold(message) {
    this.sent = message;
    this.changed();
  }

  /** The server has what was sent, or has not: then it is before what was written since. */
  settle(isTaken) {
    const { sent } = this;
    this.sent = "";
    if (isTaken) return this.changed();
    this.returned = sent;
    this.put(joined(sent, this.box.value));
  }

  changed() {
    remember(this.name, joined(this.sent, this.box.value));
    this.grow();
  }

  grow() {
    this.box.style.height = "auto";
    // Hidden boxes have no height to grow to.
    if (this.box.scrollHeight) this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}

// Text files that become part of a message.

// A model reads this for minutes already; more is most likely a mistake.
const MOST_BYTES = 1024 * 1024;

/** The name and the text of a file, as a message has them. */
async function readText(file) {
  if (file.size > MOST_BYTES) {
    const size = (file.size / MOST_BYTES).toFixed(1);
    throw new Error(`${file.name} has ${size} MiB: a message takes text files of up to 1 MiB`);
  }
  const text = new TextDecoder().decode(await file.arrayBuffer());
  // U+FFFD takes the place of what is no UTF-8
  if (!/[\0\uFFFD]/.test(text)) return `${file.name}:\n\n${fenced(text)}`;
  throw new Error(`${file.name} is no text in UTF-8: only text files can become part of a message`);
}

/** A fence that is longer than any in the text. */
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
