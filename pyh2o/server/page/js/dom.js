// Shared by all modules: elements, dialogs, messages to the user, downloads, formatted numbers.

/** Creates an element; a function becomes a listener, `true` an empty attribute. */
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

/** Creates a button that does not submit a form. */
export function button(label, click, attributes = {}) {
  return h("button", { type: "button", click, ...attributes }, label);
}

export function byId(id) {
  return document.getElementById(id);
}

/** Calls `work` at most once in `wait` ms, and once more after the last call. */
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

// Dialogs, each a <dialog> that is removed when it closes; Esc cancels.

/** Shows a dialog; resolves to whether the user pressed the button `yes`. */
export function ask(title, content, yes, { no = "Cancel", danger = false, wide = false } = {}) {
  return new Promise((resolve) => {
    const close = (answer) => () => { dialog.returnValue = answer; dialog.close(answer); };
    const buttons = h("p", { class: "buttons" },
      no ? button(no, close("")) : null,
      h("button", { type: "submit", class: danger ? "danger" : "primary" }, yes));
    const submit = (event) => { event.preventDefault(); close("yes")(); };
    const form = h("form", { submit }, h("h2", { id: "dialog-title" }, title), ...content, buttons);
    const dialog = h("dialog", { "aria-labelledby": "dialog-title", class: wide ? "wide" : null }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
    if (danger) buttons.firstElementChild.focus();
  });
}

/** Asks for a text, in a textarea for type "area"; null if the user cancels. */
export async function askText(title, label, value = "", type = "text") {
  const attributes = { value, required: true, autocomplete: "off" };
  const box = type === "area" ? h("textarea", { rows: 8, dir: "auto", ...attributes }) : h("input", { type, ...attributes });
  const agreed = await ask(title, [h("label", { class: "field" }, label, box)], "OK");
  return agreed && box.value.trim() ? box.value.trim() : null;
}

/** Asks for confirmation of an action that cannot be undone. */
export function askToConfirm(title, text, yes) {
  return ask(title, [h("p", {}, text)], yes, { danger: true });
}

// Messages: announcements for screen readers, and toasts.

const ANNOUNCE_MS = 4000;
const TOAST_MS = 8000;
// A screen reader cannot be interrupted while it reads an announcement.
const MAX_ANNOUNCED = 1500;

let unannounced = "";
let announcedAt = 0;
let toastTimer = 0;

/** Announces a line to screen readers. */
export function announce(line) {
  byId("live").textContent = line;
}

/** Announces streamed text in whole sentences, every few seconds; the rest at the end. */
export function announceText(text, isEnd = false) {
  unannounced += text;
  const now = performance.now();
  if (!isEnd && now - announcedAt < ANNOUNCE_MS) return;
  const end = isEnd ? unannounced.length : unannounced.search(/[.!?\n][^.!?\n]*$/) + 1;
  if (!end) return;
  announce(unannounced.slice(0, end).slice(-MAX_ANNOUNCED));
  unannounced = unannounced.slice(end);
  announcedAt = now;
}

/** Shows an error or a note for some seconds. */
export function showToast(error) {
  const toast = byId("toast");
  toast.textContent = typeof error === "string" ? error : error.message;
  toast.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => toast.classList.remove("shown"), TOAST_MS);
}

/** Runs `work`; shows its error, and returns null then. */
export async function reportErrors(work) {
  try {
    return await work();
  } catch (error) {
    showToast(error);
    return null;
  }
}

/** Does the same, and marks a view as busy meanwhile, so that it starts nothing else. */
export function whileBusy(view, work) {
  view.isBusy = true;
  return reportErrors(work).finally(() => { view.isBusy = false; });
}

/** Creates a button that copies a text. */
export function copyButton(text, attributes) {
  const copy = button("Copy", () => reportErrors(async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    copy.textContent = "Copied";
    copy.focus();
    announce("Copied");
  }), attributes);
  return copy;
}

/** Copies through a selection: browsers offer no clipboard to pages loaded over plain HTTP from another machine. */
function copySelected(text) {
  const box = h("textarea", { class: "visually-hidden", value: text });
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  if (!isCopied) throw new Error("the browser does not allow copying here: select the text and copy it yourself");
}

const DOWNLOAD_MS = 60_000;

/** Downloads a file. */
export function download(blob, name) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name.replace(/[/\\]/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(href), DOWNLOAD_MS);
  showToast(`${name} was saved in your browser's downloads folder.`);
}

/** 12345 -> "12,345" */
export function formatNumber(n) {
  return Math.round(n).toLocaleString("en");
}

/** "1 token", "12,345 tokens" */
export function plural(n, one, many = `${one}s`) {
  return `${formatNumber(n)} ${Math.round(n) === 1 ? one : many}`;
}

/** 1536 -> "1.5 KiB" */
export function formatBytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit += 1) n /= 1024;
  return `${n < 10 && unit ? n.toFixed(1) : formatNumber(n)} ${units[unit]}`;
}

export function formatSpeed(n) {
  return `${n < 100 ? n.toFixed(1) : formatNumber(n)} tokens/s`;
}

/** 0.123 -> "12 %" */
export function formatPercent(fraction) {
  const value = fraction * 100;
  return `${value > 0 && value < 1 ? value.toFixed(2) : value.toFixed(value < 10 ? 1 : 0)} %`;
}
