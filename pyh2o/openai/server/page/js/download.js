// Files that the page hands out.

import { h } from "./dom.js";
import { complain } from "./live.js";

const KEPT_MS = 60_000;

/** Hands a file to whoever sits before the page. */
export function save(blob, name) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name.replace(/[/\\]/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(href), KEPT_MS);
  complain(`${name} was saved where your browser keeps downloads.`);
}
