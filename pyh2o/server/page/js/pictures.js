// Pictures and sound in messages. A marker stands for each in the text: with the file itself as a data URL before it is sent,
// with the hash of the server's file afterwards.

import * as api from "./api.js";
import { h } from "./dom.js";

export const PICTURE = /<picture:([0-9a-f]{64}|data:[^<>]*)>\n?/g;

const MAX_PIXELS = 2048; // of the longest side: projectors scale larger pictures down
const MAX_BYTES = 700 * 1024; // a request of 4 MiB holds four, as base64 adds a third
const QUALITIES = [0.9, 0.8, 0.65, 0.5];

/** The marker of a picture or sound file. */
export async function mediaMarker(file) {
  return `<picture:${await dataURL(file.type.startsWith("audio/") ? file : await scaledDown(file))}>\n`;
}

/** Converts a picture to an upright JPEG without metadata, such as the location. */
async function scaledDown(file) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`this browser cannot open the picture ${file.name}: convert it to JPEG or PNG`);
  });
  const scale = Math.min(1, MAX_PIXELS / Math.max(picture.width, picture.height));
  const [width, height] = [picture.width, picture.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // background of transparent pictures
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, width, height);
  picture.close();
  let jpeg = null;
  for (const quality of QUALITIES) {
    jpeg = await new Promise((resolve) => { canvas.toBlob(resolve, "image/jpeg", quality); });
    if (jpeg?.size <= MAX_BYTES) break;
  }
  return jpeg;
}

export function dataURL(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

/** Converts a message with new pictures to content parts of the API. */
export function toParts(message) {
  const parts = message.split(/<picture:(data:[^<>]*)>/);
  if (parts.length === 1) return message;
  return parts.map((part, n) => (n % 2 ? mediaPart(part) : { type: "text", text: part }));
}

function mediaPart(url) {
  const [, format, data] = /^data:audio\/([\w-]*).*?,(.*)$/.exec(url) ?? [];
  return format === undefined ? { type: "image_url", image_url: { url } } : { type: "input_audio", input_audio: { data, format } };
}

const files = new Map(); // hash -> promise of the server's file

function serverFile(session, hash) {
  if (!files.has(hash)) files.set(hash, api.picture(session, hash).catch(() => null));
  return files.get(hash);
}

/** Shows a picture, which links to its file once it was sent, or a sound player. */
export function pictureElement(session, marker) {
  const key = marker.trim().slice("<picture:".length, -1);
  if (key.startsWith("data:")) return h("span", { class: "picture" }, mediaElement(key, key.startsWith("data:audio/")));
  const frame = h("span", { class: "picture" });
  serverFile(session, key).then((file) => {
    if (!file) return frame.replaceChildren("Picture not found");
    const url = file.url ??= URL.createObjectURL(file);
    const isSound = file.type.startsWith("audio/");
    const element = mediaElement(url, isSound);
    return frame.replaceChildren(isSound ? element : h("a", { href: url, target: "_blank" }, element));
  });
  return frame;
}

const mediaElement = (src, isSound) => (isSound ? h("audio", { src, controls: true, "aria-label": "Sound" }) : h("img", { src, alt: "Picture" }));
