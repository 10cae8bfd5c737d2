// Questions, each a <dialog> that is gone when it is answered; Esc answers no.

import { button, h } from "./dom.js";

/**
 * Shows a dialog and waits for its end.
 * @param {string} title
 * @param {Node[]} content
 * @param {string} yes what the button that agrees says
 * @param {{no?: string, danger?: boolean, wide?: boolean}} [how]
 * @returns {Promise<boolean>} whether somebody agreed
 */
export function ask(title, content, yes, { no = "Cancel", danger = false, wide = false } = {}) {
  return new Promise((resolve) => {
    const close = (answer) => () => { dialog.returnValue = answer; dialog.close(answer); };
    const buttons = h("p", { class: "buttons" },
      no ? button(no, close("")) : null,
      h("button", { type: "submit", class: danger ? "danger" : "primary" }, yes));
    const submit = (event) => { event.preventDefault(); close("yes")(); };
    const form = h("form", { submit }, h("h2", { id: "asked" }, title), ...content, buttons);
    const dialog = h("dialog", { "aria-labelledby": "asked", class: wide ? "wide" : null }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
    if (danger) buttons.firstElementChild.focus();
  });
}

/** Asks for a line of text; null if nobody answered. */
export async function askLine(title, label, value = "", type = "text") {
  const input = h("input", { type, value, required: true, autocomplete: "off" });
  const agreed = await ask(title, [h("label", { class: "field" }, label, input)], "OK");
  return agreed && input.value.trim() ? input.value.trim() : null;
}

/** Asks whether to do what cannot be taken back. */
export function askWhether(title, text, yes) {
  return ask(title, [h("p", {}, text)], yes, { danger: true });
}
