// Files that are part of a message: read as text, written into it behind their names, and found there again.

import * as api from "./api.js";
import { counted, h } from "./dom.js";
import { joined } from "./storage.js";

// A model reads this for minutes already; more is most likely a mistake.
const MOST_BYTES = 1024 * 1024;
// A name with an ending, and a fence longer than people write: nothing else in a message is a file.
const LEAST_FENCE = 4;
const FILE = /(?:^|\n\n)([^\n]+\.\w{1,9}):\n\n(`{4,})\n([\s\S]*?)\n\2(?=\n\n|$)/g;

/** The text of a file; `tell` hears how far that is, 0 to 1. */
export async function readFile(file, tell) {
  const [kind] = file.type.split("/");
  if (["image", "audio", "video"].includes(kind)) {
    throw new Error(`${file.name} is ${{ image: "a picture", audio: "sound", video: "a film" }[kind]}: this model reads text only, so say in words what is in it`);
  }
  const isPDF = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const text = isPDF ? await textOfPDF(file, tell) : await textOf(file);
  if (new Blob([text]).size > MOST_BYTES) throw tooLarge(file.name, new Blob([text]).size);
  return text.replace(/\r\n/g, "\n").replace(/\n$/, "");
}

async function textOf(file) {
  if (file.size > MOST_BYTES) throw tooLarge(file.name, file.size);
  const text = new TextDecoder().decode(await file.arrayBuffer());
  // U+FFFD takes the place of what is no UTF-8
  if (!/[\0\uFFFD]/.test(text)) return text;
  throw new Error(`${file.name} is no text in UTF-8: only text and PDF files can become part of a message`);
}

async function textOfPDF(file, tell) {
  const pages = [];
  for await (const { page, of, text } of api.pages(file.name, await inBase64(file))) {
    pages.push(text.trim());
    tell(page / of);
  }
  const whole = pages.filter(Boolean).join("\n\n");
  if (whole) return whole;
  throw new Error(`${file.name} has pictures of pages and no text: run it through text recognition (OCR) first`);
}

function inBase64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

const tooLarge = (name, size) =>
  new Error(`${name} has ${(size / MOST_BYTES).toFixed(1)} MiB of text: a message takes files of up to 1 MiB`);

/** A message with files behind it. */
export const withFiles = (text, files) => joined(text, ...files.map((file) => `${file.name}:\n\n${fenced(file.text)}`));

/** What somebody wrote in a message, and the files behind it. */
export function split(message) {
  const files = [...message.matchAll(FILE)].map(([whole, name, , text]) => ({ whole, name, text }));
  const text = files.reduce((rest, { whole }) => rest.replace(whole, () => ""), message);
  return { text: files.length ? text.replace(/^\n\n/, "") : text, files };
}

/** A fence that is longer than any in the text. */
function fenced(text) {
  const longest = Math.max(LEAST_FENCE - 1, ...[...text.matchAll(/`{3,}/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

/** A message as it is shown: files are lines that open. */
export function shown(message) {
  const { text, files } = split(message);
  return [text, ...files.map((file) => h("details", { class: "file" },
    h("summary", {}, `${file.name} · ${counted(file.text.split("\n").length, "line")}`), h("pre", { tabindex: 0 }, file.text)))];
}
