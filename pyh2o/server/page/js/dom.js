// What all of the page is made of: elements, questions, what is said aside, files, numbers as people read them.

/** An element; a function becomes a listener, `true` an empty attribute. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child || child === ""));
  return element;
}

/** A button that submits nothing. */
export function button(label, click, attributes = {}) {
  return h("button", { type: "button", click, ...attributes }, label);
}

/** The element with this id, which the page has from the start. */
export function byId(id) {
  return document.getElementById(id);
}

/** Calls `work` at most once in `wait` ms, the last time after the last call. */
export function throttled(work, wait) {
  let timer = 0;
  let last = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      last = performance.now();
      work(...values);
    }, Math.max(0, last + wait - performance.now()));
  };
}

// Questions, each a <dialog> that is gone when it is answered; Esc answers no.

/** Shows a dialog and waits for its end: whether somebody agreed, with the button that says `yes`. */
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

/** Asks for a text, in an area or in an input of this type; null if nobody answered. */
export async function askText(title, label, value = "", type = "text") {
  const attributes = { value, required: true, autocomplete: "off" };
  const box = type === "area" ? h("textarea", { rows: 8, dir: "auto", ...attributes }) : h("input", { type, ...attributes });
  const agreed = await ask(title, [h("label", { class: "field" }, label, box)], "OK");
  return agreed && box.value.trim() ? box.value.trim() : null;
}

/** Asks whether to do what cannot be taken back. */
export function askWhether(title, text, yes) {
  return ask(title, [h("p", {}, text)], yes, { danger: true });
}

// What is said aside: to screen readers without flooding them, and complaints that all can see.

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

// Buttons that copy a text.

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

// Files that the page hands out.

const KEPT_MS = 60_000;

/** Hands a file to whoever sits before the page. */
export function save(blob, name) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name.replace(/[/\\]/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(href), KEPT_MS);
  complain(`${name} was saved where your browser keeps downloads.`);
}

// Numbers as people read them.

/** 12345 -> "12,345" */
export function count(n) {
  return Math.round(n).toLocaleString("en");
}

/** "1 token", "12,345 tokens" */
export function counted(n, what, more = `${what}s`) {
  return `${count(n)} ${Math.round(n) === 1 ? what : more}`;
}

/** Bytes in the unit that leaves few digits. */
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit += 1) n /= 1024;
  return `${n < 10 && unit ? n.toFixed(1) : count(n)} ${units[unit]}`;
}

/** Tokens in a second. */
export function speed(n) {
  return `${n < 100 ? n.toFixed(1) : count(n)} tokens/s`;
}

/** A share as a percentage. */
export function percent(share) {
  const value = share * 100;
  return `${value > 0 && value < 1 ? value.toFixed(2) : value.toFixed(value < 10 ? 1 : 0)} %`;
}
