// Pictures and sound of a message: drawn smaller, sent as parts of it, and shown again.

// In a message a mark stands for each: the server's has the hash of a file, one that is not sent yet the file itself.

import * as api from "./api.js";
import { h } from "./dom.js";

export const PICTURE = /<picture:([0-9a-f]{64}|data:[^<>]*)>\n?/g;

const MOST_PIXELS = 2048; // of the longest side: projectors see no more
const MOST_BYTES = 700 * 1024; // a request takes 4 MiB: four of them, as base64 takes a third more
const QUALITIES = [0.9, 0.8, 0.65, 0.5];

/** The mark of a file with a picture or sound. */
export async function marked(file) {
  return `<picture:${await dataURL(file.type.startsWith("audio/") ? file : await smaller(file))}>\n`;
}

/** A picture as JPEG, upright, and without what else its file says, such as the place. */
async function smaller(file) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no picture that this browser can show: save it as JPEG or PNG`);
  });
  const scale = Math.min(1, MOST_PIXELS / Math.max(picture.width, picture.height));
  const [width, height] = [picture.width, picture.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what can be seen through
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, width, height);
  picture.close();
  let drawn = null;
  for (const quality of QUALITIES) {
    drawn = await new Promise((resolve) => { canvas.toBlob(resolve, "image/jpeg", quality); });
    if (drawn?.size <= MOST_BYTES) break;
  }
  return drawn;
}

export function dataURL(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

/** A message as the server takes it: in parts, where it has new pictures. */
export function inParts(message) {
  const parts = message.split(/<picture:(data:[^<>]*)>/);
  if (parts.length === 1) return message;
  return parts.map((part, n) => (n % 2 ? asPart(part) : { type: "text", text: part }));
}

function asPart(url) {
  const [, format, data] = /^data:audio\/([\w-]*).*?,(.*)$/.exec(url) ?? [];
  return format === undefined ? { type: "image_url", image_url: { url } } : { type: "input_audio", input_audio: { data, format } };
}

const files = new Map(); // of pictures that were sent, by their hashes

/** The file of a picture that was sent. */
function fileOf(session, key) {
  if (!files.has(key)) files.set(key, api.picture(session, key).catch(() => null));
  return files.get(key);
}

/** A message in which no picture is the server's any more, as far as that still has them. */
export async function withData(session, message) {
  const urls = new Map();
  for (const [, key] of message.matchAll(PICTURE)) {
    const file = key.startsWith("data:") ? null : await fileOf(session, key);
    if (file) urls.set(key, await dataURL(file));
  }
  return message.replace(PICTURE, (whole, key) => whole.replace(key, urls.get(key) ?? key));
}

/** A picture, which opens once it was sent, or what plays sound. */
export function shownPicture(session, mark) {
  const key = mark.trim().slice("<picture:".length, -1);
  if (key.startsWith("data:")) return h("span", { class: "picture" }, element(key, key.startsWith("data:audio/")));
  const frame = h("span", { class: "picture" });
  fileOf(session, key).then((file) => {
    if (!file) return frame.replaceChildren("A picture that is not here any more");
    const url = file.url ??= URL.createObjectURL(file);
    const isSound = file.type.startsWith("audio/");
    const shown = element(url, isSound);
    return frame.replaceChildren(isSound ? shown : h("a", { href: url, target: "_blank" }, shown));
  });
  return frame;
}

const element = (src, isSound) => (isSound ? h("audio", { src, controls: true, "aria-label": "Sound" }) : h("img", { src, alt: "Picture" }));
