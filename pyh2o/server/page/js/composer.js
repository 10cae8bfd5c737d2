// The message box: keys, attached files, and its buttons.

import { joinMessage, readFile, splitMessage } from "./attachments.js";
import { button, h, reportErrors, showToast } from "./dom.js";
import { stop } from "./generation.js";
import { pictureElement } from "./pictures.js";
import { joinParts, loadDraft, moveDraft, removePrefix, saveDraft } from "./storage.js";

export class Composer {
  /** `handlers` are send(message), edit(), and can(ability): whether the model "sees" or "hears". */
  constructor(handlers) {
    this.handlers = handlers;
    this.pending = ""; // sent, and not yet confirmed by the server
    this.returned = ""; // returned to the box because the server did not confirm it
    this.id = null; // of the session
    this.files = []; // each with name, and text or marker; `progress` while it is read
    this.box = h("textarea", {
      rows: 1, dir: "auto", "aria-label": "Message", placeholder: "Write a message", autocomplete: "off",
      keydown: (event) => this.onKey(event), input: () => this.onChange(),
      paste: (event) => this.onFiles(event, event.clipboardData),
    });
    this.picker = h("input", { type: "file", multiple: true, class: "visually-hidden", tabindex: -1,
      "aria-label": "Files to add", change: () => this.addFiles([...this.picker.files]) });
    this.chips = h("ul", { class: "chips", "aria-label": "Attached files" });
    const row = h("div", { class: "box" },
      button("+", () => this.picker.click(), { class: "icon", "aria-label": "Add files", title: "Attach text, PDF files, pictures or sound. You can also drop or paste them here." }), this.box,
      h("button", { type: "submit", class: "primary send" }, "Send"),
      button("Stop", stop, { class: "stop send" }));
    this.element = h("form", {
      class: "composer", "aria-label": "Write a message",
      submit: (event) => { event.preventDefault(); this.submit(); },
    }, this.chips, row, this.picker);
  }

  /** The message with its files, without those still being read. */
  get message() {
    return joinMessage(this.box.value, this.files.filter((file) => file.progress === undefined));
  }

  set message(message) {
    const { text, files, pictures } = splitMessage(message);
    this.box.value = text;
    this.files = [...pictures, ...files, ...this.files.filter((file) => file.progress !== undefined)];
    this.showFiles();
  }

  /** Opens the draft of a session, without a message that is the session's `last` one. */
  open(id, last) {
    this.id = id;
    const draft = removePrefix(loadDraft(id), last);
    if (!this.message) this.message = this.returned = draft; // the server may still receive it
    this.onChange();
  }

  /** Moves the draft to a new session. */
  moveTo(id) {
    moveDraft(this.id, id);
    this.id = id;
  }

  /** Removes a returned message from the box if it has become the session's `last` message after all. */
  removeDelivered(last) {
    if (removePrefix(this.returned, last) === this.returned) return;
    this.returned = "";
    this.message = removePrefix(this.message, last);
    this.onChange();
  }

  /** Adds dropped or pasted files. */
  onFiles(event, { files, types }) {
    const isText = types.includes("text/plain") && types.includes("text/html"); // office programs add a picture of the text
    if (!files.length || isText) return;
    event.preventDefault();
    this.addFiles([...files]);
  }

  async addFiles(files) {
    this.picker.value = "";
    this.box.focus();
    for (const source of files) {
      const file = { name: source.name.replace(/[\n:]/g, " "), progress: 0 };
      this.files.push(file);
      this.showFiles();
      const onProgress = (progress) => { file.progress = progress; this.showFiles(); };
      const content = await reportErrors(() => readFile(source, { onProgress, can: this.handlers.can }));
      if (content) Object.assign(file, content, { progress: undefined });
      else this.files = this.files.filter((each) => each !== file);
      this.showFiles();
      this.onChange();
    }
  }

  showFiles() {
    this.chips.replaceChildren(...this.files.map((file) => {
      const remove = () => { this.files = this.files.filter((each) => each !== file); this.showFiles(); this.onChange(); this.box.focus(); };
      return h("li", {}, file.marker && pictureElement(this.id, file.marker), file.name && h("bdi", {}, file.name),
        file.progress === undefined ? button("×", remove, { class: "icon", "aria-label": `Remove ${file.name || "the picture"}` })
          : h("progress", { value: file.progress, "aria-label": `Reading ${file.name}` }));
    }));
  }

  onKey(event) {
    if (event.isComposing) return; // Enter ends the composition of an input method
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.message) {
      event.preventDefault();
      this.handlers.edit();
    }
  }

  submit() {
    const unread = this.files.find((file) => file.progress !== undefined);
    if (unread) return showToast(`${unread.name} is still being read: send the message afterwards.`);
    const message = this.message.trim();
    if (message) this.handlers.send(message);
  }

  /** Empties the box for the next message, and holds this one until `settle`. */
  send(message) {
    this.returned = this.message = "";
    this.hold(message);
  }

  /** Holds a message, also across a reload of the page, until `settle`. */
  hold(message) {
    this.pending = message;
    this.onChange();
  }

  /** Releases the held message; if the server does not have it, it returns to the box before the current draft. */
  settle(isDelivered) {
    const { pending } = this;
    this.pending = "";
    if (isDelivered) return this.onChange();
    this.returned = pending;
    this.message = joinParts(pending, this.message);
    this.onChange();
    this.box.focus();
  }

  onChange() {
    saveDraft(this.id, joinParts(this.pending, this.message));
    this.box.style.height = "auto";
    // The scroll height of a hidden box is 0.
    if (this.box.scrollHeight) this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}
