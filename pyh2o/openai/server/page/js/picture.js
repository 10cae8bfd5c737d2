// The map as a file, with its legend: PNG and SVG.

import { save } from "./download.js";
import { STATES } from "./map.js";
import { layout, paint, pixelsOf } from "./paint.js";

const WIDTH = 600, HEIGHT = 800, LEGEND = 26;

const hex = (pixel) => `#${[0, 8, 16].map((shift) => ((pixel >> shift) & 255).toString(16).padStart(2, "0")).join("")}`;
const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const legend = () => STATES.filter(({ colour }) => colour);

/** Saves the map as a PNG. */
export async function savePng(map, title) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [WIDTH, HEIGHT];
  paint(canvas, map, false);
  const whole = document.createElement("canvas");
  [whole.width, whole.height] = [WIDTH + 40, HEIGHT + 70 + LEGEND * legend().length];
  const context = whole.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, whole.width, whole.height);
  context.drawImage(canvas, 20, 50);
  context.font = "16px sans-serif";
  context.fillStyle = "#1d1f23";
  context.fillText(title, 20, 32, WIDTH);
  legend().forEach(({ colour, words }, i) => {
    const y = HEIGHT + 62 + LEGEND * i;
    context.fillStyle = `rgb(${colour.join()})`;
    context.fillRect(20, y, 16, 16);
    context.fillStyle = "#1d1f23";
    context.fillText(words, 44, y + 14);
  });
  save(await new Promise((resolve) => whole.toBlob(resolve)), `${title}.png`);
}

/** Saves the map as an SVG: neighbours of one colour are one rectangle. */
export function saveSvg(map, title) {
  const { perLine, lines, pixels } = layout(map.n, WIDTH, HEIGHT);
  const image = new Uint32Array(pixelsOf(map, perLine, lines, false).data.buffer);
  const width = WIDTH / perLine;
  const parts = [];
  for (let line = 0; line < lines; line += 1) {
    const end = Math.min(map.n, (line + 1) * perLine);
    for (let at = line * perLine; at < end;) {
      let next = at + 1;
      while (next < end && image[next] === image[at]) next += 1;
      const x = (at - line * perLine) * width;
      parts.push(`<rect x="${x.toFixed(2)}" y="${line * pixels}" width="${((next - at) * width).toFixed(2)}" height="${pixels}" fill="${hex(image[at])}"/>`);
      at = next;
    }
  }
  const words = legend().map(({ colour, words: text }, i) =>
    `<rect y="${HEIGHT + 12 + LEGEND * i}" width="16" height="16" fill="rgb(${colour.join()})"/>`
    + `<text x="24" y="${HEIGHT + 26 + LEGEND * i}">${escaped(text)}</text>`);
  const height = HEIGHT + 70 + LEGEND * legend().length;
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="-20 -50 ${WIDTH + 40} ${height}" font-family="sans-serif" font-size="16" shape-rendering="crispEdges">`
    + `<title>${escaped(title)}</title><rect x="-20" y="-50" width="${WIDTH + 40}" height="${height}" fill="#fff"/>`
    + `<text y="-18">${escaped(title)}</text>${parts.join("")}${words.join("")}</svg>`;
  save(new Blob([svg], { type: "image/svg+xml" }), `${title}.svg`);
}
