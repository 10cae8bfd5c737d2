// The box that messages are written in: keys, text files, and the buttons beside it.

import { button, careful, count, h } from "./dom.js";
import { stop } from "./making.js";
import { joined, moveDraft, recall, recallFiles, remember, rememberFiles, without } from "./storage.js";

export class Composer {
  /** `uses` has send(message), edit() and cancelEdit(). */
  constructor(uses) {
    this.uses = uses;
    this.files = [];
    this.isEdit = false;
    this.aside = { text: "", files: [] }; // the draft, while the last message is changed
    this.sent = ""; // of which nobody knows yet whether the server has it
    this.returned = ""; // what came back into the box
    this.name = null; // of the session that it is for
    this.box = h("textarea", {
      rows: 1, dir: "auto", "aria-label": "Message", placeholder: "Write a message", autocomplete: "off",
      keydown: (event) => this.onKey(event), input: () => this.changed(),
    });
    this.chips = h("div", { class: "chips" });
    this.note = h("div", { class: "edit-note", hidden: true },
      h("span", {}, "You are changing your last message."),
      button("Cancel", () => this.cancel(), { class: "small" }));
    this.picker = h("input", { type: "file", multiple: true, class: "unseen", tabindex: -1,
      "aria-label": "Text files", change: () => { this.take(this.picker.files); this.picker.value = ""; } });
    this.sendButton = h("button", { type: "submit", class: "primary send", "aria-label": "Send" }, "Send");
    const row = h("div", { class: "box" },
      button("+", () => this.picker.click(), { class: "icon", "aria-label": "Add text files" }),
      this.box, this.sendButton,
      button("Stop", stop, { class: "stop send" }));
    this.element = h("form", {
      class: "composer", "aria-label": "Write a message",
      submit: (event) => { event.preventDefault(); this.submit(); },
    }, this.note, this.chips, row, this.picker);
  }

  /** Keeps what is written for a session, and shows what was kept, unless its `last` message is that. */
  keepFor(name, last) {
    this.name = name;
    const kept = without(recall(name), last);
    if (!this.box.value) this.box.value = this.returned = kept; // the server may get to it yet
    this.files = [...recallFiles(name), ...this.files];
    this.showFiles();
    this.changed();
  }

  /** The session that it is for has this name. */
  moveTo(name) {
    moveDraft(this.name, name);
    this.name = name;
  }

  /** Another message is the last one: nothing else takes its place, and if it had come back here it is no draft. */
  arrived(last) {
    if (this.isEdit) return this.endEdit();
    if (without(this.returned, last) === this.returned) return;
    this.returned = "";
    this.box.value = without(this.box.value, last);
    this.changed();
  }

  /** What was to take the place of a message is a new one. */
  endEdit() {
    const { text, files } = this.aside;
    this.leaveEdit(joined(this.box.value, text), [...this.files, ...files]);
    this.uses.cancelEdit();
  }

  leaveEdit(text, files) {
    this.isEdit = false;
    this.note.hidden = true;
    this.aside = { text: "", files: [] };
    this.files = files;
    this.showFiles();
    this.box.value = text;
    this.changed();
  }

  /** Lets files be dropped onto an element. */
  takeDrops(element) {
    element.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      element.classList.add("dropping");
    });
    element.addEventListener("dragleave", () => element.classList.remove("dropping"));
    element.addEventListener("drop", (event) => {
      element.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.take(event.dataTransfer.files);
    });
  }

  async take(files) {
    for (const file of [...files]) {
      const taken = await careful(() => readText(file));
      if (taken) this.files.push(taken);
    }
    this.showFiles();
    this.box.focus();
  }

  showFiles() {
    rememberFiles(this.name, [...this.files, ...this.aside.files]);
    this.chips.replaceChildren(...this.files.map((file) => h("span", { class: "chip" },
      `${file.name} · ${count(file.text.length)} characters `,
      button("×", () => { this.files = this.files.filter((each) => each !== file); this.showFiles(); },
        { class: "icon small", "aria-label": `Leave ${file.name} out` }))));
  }

  onKey(event) {
    if (event.isComposing) return; // Enter ends what an input method composes
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.box.value && !this.isEdit) {
      event.preventDefault();
      this.uses.edit();
    } else if (event.key === "Escape" && this.isEdit) {
      event.stopPropagation();
      this.cancel();
    }
  }

  submit() {
    const message = withFiles(this.box.value.trim(), this.files);
    if (message) this.uses.send(message);
  }

  /** Lets the last message be changed; the draft waits. */
  edit(message) {
    if (this.isEdit) return this.box.focus();
    this.aside = { text: this.box.value, files: this.files };
    this.files = [];
    this.showFiles();
    this.isEdit = true;
    this.note.hidden = false;
    this.put(message);
    this.box.setSelectionRange(message.length, message.length);
  }

  cancel() {
    this.send("");
    this.uses.cancelEdit();
    this.box.focus();
  }

  put(message) {
    this.box.value = message;
    this.changed();
    this.box.focus();
  }

  /** Holds a message while it is sent; the box is free for the next one, or has the draft again. */
  send(message) {
    this.returned = "";
    this.leaveEdit(this.aside.text, this.aside.files);
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
    remember(this.name, joined(this.sent, this.box.value, this.aside.text));
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

/** The name and the text of a file. */
async function readText(file) {
  if (file.size > MOST_BYTES) {
    const size = (file.size / MOST_BYTES).toFixed(1);
    throw new Error(`${file.name} has ${size} MiB: a message takes text files of up to 1 MiB`);
  }
  const data = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(data);
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // said below
  }
  throw new Error(`${file.name} is no text in UTF-8: only text files can become part of a message`);
}

/** A message with the files behind it. */
function withFiles(message, files) {
  const parts = files.map(({ name, text }) => `${name}:\n\n${fenced(text)}`);
  return [message, ...parts].filter(Boolean).join("\n\n");
}

/** A fence that is longer than any in the text. */
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
