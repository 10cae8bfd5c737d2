// Buttons that copy a text.

import { button, h } from "./dom.js";
import { announce, careful } from "./live.js";

/** A button that copies a text. */
export function copyButton(text, attributes) {
  const copy = button("Copy", () => careful(async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    copy.textContent = "Copied";
    copy.focus();
    announce("Copied");
  }), attributes);
  return copy;
}

/** The old way: a page that came over plain HTTP from another machine has no clipboard. */
function copySelected(text) {
  const box = h("textarea", { class: "unseen", value: text });
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  if (!isCopied) throw new Error("the browser lets nothing be copied here: select the text, and copy that");
}
