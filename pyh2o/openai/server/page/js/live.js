// What is said aside: to screen readers without flooding them, and complaints that all can see.

import { byId } from "./dom.js";

const SPEAK_MS = 4000;
const TOAST_MS = 8000;
// A screen reader that gets more at once cannot be stopped.
const MOST_SPOKEN = 1500;

let heard = "";
let spokenAt = 0;
let toastTimer = 0;

/** Says a short line. */
export function announce(line) {
  byId("live").textContent = line;
}

/** Says streamed text in whole sentences, every few seconds; the rest when it has ended. */
export function announceText(text, isEnd = false) {
  heard += text;
  const now = performance.now();
  if (!isEnd && now - spokenAt < SPEAK_MS) return;
  const end = isEnd ? heard.length : heard.search(/[.!?\n][^.!?\n]*$/) + 1;
  if (!end) return;
  announce(heard.slice(0, end).slice(-MOST_SPOKEN));
  heard = heard.slice(end);
  spokenAt = now;
}

/** Shows what went wrong, or a note. */
export function complain(error) {
  const toast = byId("toast");
  toast.textContent = typeof error === "string" ? error : error.message;
  toast.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => toast.classList.remove("shown"), TOAST_MS);
}

/** Runs `work` and says what goes wrong; null then. */
export async function careful(work) {
  try {
    return await work();
  } catch (error) {
    complain(error);
    return null;
  }
}

/** The same, during which a view is busy: it begins nothing else. */
export function alone(view, work) {
  view.isBusy = true;
  return careful(work).finally(() => { view.isBusy = false; });
}
