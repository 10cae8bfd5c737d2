// The box that messages are written in: keys, files, and the buttons beside it.

import { readFile, split, withFiles } from "./attachments.js";
import { button, careful, complain, h } from "./dom.js";
import { stop } from "./making.js";
import { shownPicture } from "./pictures.js";
import { joined, moveDraft, recall, remember, without } from "./storage.js";

export class Composer {
  /** `uses` has send(message), edit(), and takes(sense): whether the model sees or hears. */
  constructor(uses) {
    this.uses = uses;
    this.sent = ""; // of which nobody knows yet whether the server has it
    this.returned = ""; // what came back into the box
    this.name = null; // of the session that it is for
    this.files = []; // of each the name, and the text or the mark; while it is read `part`, how far
    this.box = h("textarea", {
      rows: 1, dir: "auto", "aria-label": "Message", placeholder: "Write a message", autocomplete: "off",
      keydown: (event) => this.onKey(event), input: () => this.changed(),
      paste: (event) => this.onFiles(event, event.clipboardData),
    });
    this.picker = h("input", { type: "file", multiple: true, class: "unseen", tabindex: -1,
      "aria-label": "Files to add", change: () => this.take([...this.picker.files]) });
    this.chips = h("ul", { class: "chips", "aria-label": "Files of this message" });
    const row = h("div", { class: "box" },
      button("+", () => this.picker.click(), { class: "icon", "aria-label": "Add files", title: "Text, PDF files, pictures and sound: choose them, or drop or paste them here" }), this.box,
      h("button", { type: "submit", class: "primary send" }, "Send"),
      button("Stop", stop, { class: "stop send" }));
    this.element = h("form", {
      class: "composer", "aria-label": "Write a message",
      submit: (event) => { event.preventDefault(); this.submit(); },
    }, this.chips, row, this.picker);
  }

  /** What is written, with its files; of those that are still read there is nothing yet. */
  get message() {
    return withFiles(this.box.value, this.files.filter((file) => file.part === undefined));
  }

  set message(message) {
    const { text, files, pictures } = split(message);
    this.box.value = text;
    this.files = [...pictures, ...files, ...this.files.filter((file) => file.part !== undefined)];
    this.showFiles();
  }

  /** Keeps what is written for a session, and shows what was kept, unless its `last` message is that. */
  keepFor(name, last) {
    this.name = name;
    const kept = without(recall(name), last);
    if (!this.message) this.message = this.returned = kept; // the server may get to it yet
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
    this.message = without(this.message, last);
    this.changed();
  }

  /** Takes the files of what was dropped or pasted, if it has some. */
  onFiles(event, { files, types }) {
    const isText = types.includes("text/plain") && types.includes("text/html"); // of which a picture comes along
    if (!files.length || isText) return;
    event.preventDefault();
    this.take([...files]);
  }

  /** Reads files, which are then part of the message. */
  async take(files) {
    this.picker.value = "";
    this.box.focus();
    for (const source of files) {
      const file = { name: source.name.replace(/[\n:]/g, " "), part: 0 };
      this.files.push(file);
      this.showFiles();
      const tell = (part) => { file.part = part; this.showFiles(); };
      const found = await careful(() => readFile(source, { tell, takes: this.uses.takes }));
      if (found) Object.assign(file, found, { part: undefined });
      else this.files = this.files.filter((each) => each !== file);
      this.showFiles();
      this.changed();
    }
  }

  showFiles() {
    this.chips.replaceChildren(...this.files.map((file) => {
      const gone = () => { this.files = this.files.filter((each) => each !== file); this.showFiles(); this.changed(); this.box.focus(); };
      return h("li", {}, file.mark && shownPicture(this.name, file.mark), file.name && h("bdi", {}, file.name),
        file.part === undefined ? button("×", gone, { class: "icon", "aria-label": `Leave ${file.name || "the picture"} out` })
          : h("progress", { value: file.part, "aria-label": `Reading ${file.name}` }));
    }));
  }

  onKey(event) {
    if (event.isComposing) return; // Enter ends what an input method composes
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.message) {
      event.preventDefault();
      this.uses.edit();
    }
  }

  submit() {
    const read = this.files.find((file) => file.part !== undefined);
    if (read) return complain(`${read.name} is still being read: send the message when it has been.`);
    const message = this.message.trim();
    if (message) this.uses.send(message);
  }

  put(message) {
    this.message = message;
    this.changed();
    this.box.focus();
  }

  /** Holds a message while it is sent; the box is free for the next one. */
  send(message) {
    this.returned = this.message = "";
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
    this.put(joined(sent, this.message));
  }

  changed() {
    remember(this.name, joined(this.sent, this.message));
    this.grow();
  }

  grow() {
    this.box.style.height = "auto";
    // Hidden boxes have no height to grow to.
    if (this.box.scrollHeight) this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}
