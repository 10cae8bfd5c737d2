// Files that are part of a message: texts are written into it behind their names, and found there again.

import * as api from "./api.js";
import { counted, h } from "./dom.js";
import { PICTURE, dataURL, marked, shownPicture } from "./pictures.js";
import { joined } from "./storage.js";

// A model reads this for minutes already; more is most likely a mistake.
const MOST_BYTES = 1024 * 1024;
// A name with an ending, and a fence longer than people write: nothing else in a message is a file.
const LEAST_FENCE = 4;
const FILE = /(?:^|\n\n)([^\n]+\.\w{1,9}):\n\n(`{4,})\n([\s\S]*?)\n\2(?=\n\n|$)/g;
const SENSES = { image: ["sees", "a picture"], audio: ["hears", "sound"] };

/** What a file is in a message, a `text` or a `mark`; `tell` hears how far that is, 0 to 1, and `takes` what a model sees or hears. */
export async function readFile(file, { tell, takes }) {
  const [kind] = file.type === "image/svg+xml" ? "text" : file.type.split("/");
  if (kind === "video") throw new Error(`${file.name} is a film: take a picture of it`);
  if (kind in SENSES) {
    const [sense, what] = SENSES[kind];
    if (await takes(sense)) return { mark: await marked(file) };
    throw new Error(`${file.name} is ${what}, and this model has no projector for that: start pyh2o with --mmproj FILE, or say in words what is in it`);
  }
  const isPDF = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const text = isPDF ? await textOfPDF(file, tell) : await textOf(file);
  if (new Blob([text]).size > MOST_BYTES) throw tooLarge(file.name, new Blob([text]).size);
  return { text: text.replace(/\r\n/g, "\n").replace(/\n$/, "") };
}

async function textOf(file) {
  if (file.size > MOST_BYTES) throw tooLarge(file.name, file.size);
  const text = new TextDecoder().decode(await file.arrayBuffer());
  // U+FFFD takes the place of what is no UTF-8
  if (!/[\0\uFFFD]/.test(text)) return text;
  throw new Error(`${file.name} is no text in UTF-8: only text, PDF files, pictures and sound can become part of a message`);
}

async function textOfPDF(file, tell) {
  const pages = [];
  const data = (await dataURL(file)).replace(/^.*?,/, "");
  for await (const { page, of, text } of api.pages(file.name, data)) {
    pages.push(text.trim());
    tell(page / of);
  }
  const whole = pages.filter(Boolean).join("\n\n");
  if (whole) return whole;
  throw new Error(`${file.name} has pictures of pages and no text: run it through text recognition (OCR) first`);
}

const tooLarge = (name, size) =>
  new Error(`${name} has ${(size / MOST_BYTES).toFixed(1)} MiB of text: a message takes files of up to 1 MiB`);

/** A message with its pictures before it, and texts of files behind it. */
export function withFiles(text, files) {
  const texts = files.filter((file) => file.text !== undefined).map((file) => `${file.name}:\n\n${fenced(file.text)}`);
  return files.map(({ mark }) => mark ?? "").join("") + joined(text, ...texts);
}

/** What somebody wrote in a message, the files behind it, and its pictures. */
export function split(message) {
  const pictures = [...message.matchAll(PICTURE)].map(([mark]) => ({ mark, name: "" }));
  const whole = pictures.length ? message.replace(PICTURE, "") : message;
  const files = [...whole.matchAll(FILE)].map(([found, name, , text]) => ({ found, name, text }));
  const text = files.reduce((rest, { found }) => rest.replace(found, () => ""), whole);
  return { text: files.length ? text.replace(/^\n\n/, "") : text, files, pictures };
}

/** A fence that is longer than any in the text. */
function fenced(text) {
  const longest = Math.max(LEAST_FENCE - 1, ...[...text.matchAll(/`{3,}/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

/** A message of a session as it is shown: pictures, and files as lines that open. */
export function shown(message, session) {
  const { text, files, pictures } = split(message);
  const seen = pictures.map(({ mark }) => shownPicture(session, mark));
  return [seen.length ? h("div", {}, ...seen) : "", text, ...files.map((file) => h("details", { class: "file" },
    h("summary", {}, `${file.name} · ${counted(file.text.split("\n").length, "line")}`), h("pre", { tabindex: 0 }, file.text)))];
}
