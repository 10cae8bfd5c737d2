// The box that messages are written in: keys, files, and the buttons beside it.

import { button, h } from "./dom.js";
import { recall, remember } from "./drafts.js";
import { readText, withFiles } from "./drop.js";
import { count } from "./format.js";
import { careful } from "./live.js";
import { stop } from "./making.js";

/** @typedef {{send: (message: string) => void, edit: () => void, cancelEdit: () => void}} Uses */

export class Composer {
  /** @param {Uses} uses */
  constructor(uses) {
    this.uses = uses;
    this.files = [];
    this.isEdit = false;
    /** @type {string|null} the session that it is for */
    this.name = null;
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
    const kept = recall(name);
    if (kept && kept !== last && !this.box.value) this.box.value = kept;
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

  /** Lets the last message be changed. */
  edit(message) {
    this.isEdit = true;
    this.note.hidden = false;
    this.put(message);
    this.box.setSelectionRange(message.length, message.length);
  }

  cancel() {
    this.clear();
    this.uses.cancelEdit();
    this.box.focus();
  }

  put(message) {
    this.box.value = message;
    this.changed();
    this.box.focus();
  }

  clear() {
    this.isEdit = false;
    this.note.hidden = true;
    this.files = [];
    this.showFiles();
    this.box.value = "";
    this.changed();
  }

  changed() {
    remember(this.name, this.box.value);
    this.grow();
  }

  grow() {
    this.box.style.height = "auto";
    // Hidden boxes have no height to grow to.
    if (this.box.scrollHeight) this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}
