// Files attached to a message: their text follows the message's text, each under its file name.

import * as api from "./api.js";
import { h, plural } from "./dom.js";
import { PICTURE, dataURL, mediaMarker, pictureElement } from "./pictures.js";
import { joinParts } from "./storage.js";

// Prefill of this much already takes minutes.
const MAX_BYTES = 1024 * 1024;
// A file name with an extension and a fence longer than people write distinguish attachments from other text.
const MIN_FENCE = 4;
const FILE = /(?:^|\n\n)([^\n]+\.\w{1,9}):\n\n(`{4,})\n([\s\S]*?)\n\2(?=\n\n|$)/g;
const ABILITIES = { image: ["sees", "pictures"], audio: ["hears", "sound"] };

/** Reads a file: its `text`, or for media the `marker`. `onProgress` gets 0 to 1; `can` tells whether the model "sees" or "hears". */
export async function readFile(file, { onProgress, can }) {
  const [kind] = file.type === "image/svg+xml" ? "text" : file.type.split("/");
  if (kind === "video") throw new Error(`${file.name} is a video, which models cannot read: attach a picture of it`);
  if (kind in ABILITIES) {
    const [ability, media] = ABILITIES[kind];
    if (await can(ability)) return { marker: await mediaMarker(file) };
    throw new Error(`this model cannot read ${file.name}: start pyh2o with --mmproj FILE, the model's projector for ${media}`);
  }
  const isPDF = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const text = isPDF ? await textOfPDF(file, onProgress) : await textOf(file);
  if (new Blob([text]).size > MAX_BYTES) throw tooLarge(file.name, new Blob([text]).size);
  return { text: text.replace(/\r\n/g, "\n").replace(/\n$/, "") };
}

async function textOf(file) {
  if (file.size > MAX_BYTES) throw tooLarge(file.name, file.size);
  const text = new TextDecoder().decode(await file.arrayBuffer());
  // the decoder replaces invalid UTF-8 by U+FFFD
  if (!/[\0\uFFFD]/.test(text)) return text;
  throw new Error(`${file.name} is not a text file in UTF-8: attach text, PDF files, pictures or sound`);
}

async function textOfPDF(file, onProgress) {
  const pages = [];
  const data = (await dataURL(file)).replace(/^.*?,/, "");
  for await (const { page, of, text } of api.readPDF(file.name, data)) {
    pages.push(text.trim());
    onProgress(page / of);
  }
  const whole = pages.filter(Boolean).join("\n\n");
  if (whole) return whole;
  throw new Error(`${file.name} contains scanned pages without text: run text recognition (OCR) first`);
}

const tooLarge = (name, size) =>
  new Error(`${name} has ${(size / MAX_BYTES).toFixed(1)} MiB of text: the limit for attached files is 1 MiB`);

/** Joins a message: pictures first, then the text, then the files. */
export function joinMessage(text, files) {
  const texts = files.filter((file) => file.text !== undefined).map((file) => `${file.name}:\n\n${fenced(file.text)}`);
  return files.map(({ marker }) => marker ?? "").join("") + joinParts(text, ...texts);
}

/** Splits a message into its text, files and pictures. */
export function splitMessage(message) {
  const pictures = [...message.matchAll(PICTURE)].map(([marker]) => ({ marker, name: "" }));
  const whole = pictures.length ? message.replace(PICTURE, "") : message;
  const files = [...whole.matchAll(FILE)].map(([match, name, , text]) => ({ match, name, text }));
  const text = files.reduce((rest, { match }) => rest.replace(match, () => ""), whole);
  return { text: files.length ? text.replace(/^\n\n/, "") : text, files, pictures };
}

/** Wraps a text in a fence longer than any fence in it. */
function fenced(text) {
  const longest = Math.max(MIN_FENCE - 1, ...[...text.matchAll(/`{3,}/g)].map(([fence]) => fence.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

/** The nodes that display a message: pictures, text, and a folded line for each file. */
export function messageContent(message, session) {
  const { text, files, pictures } = splitMessage(message);
  const elements = pictures.map(({ marker }) => pictureElement(session, marker));
  return [elements.length ? h("div", {}, ...elements) : "", text, ...files.map((file) => h("details", { class: "file" },
    h("summary", {}, `${file.name} · ${plural(file.text.split("\n").length, "line")}`), h("pre", { tabindex: 0 }, file.text)))];
}
