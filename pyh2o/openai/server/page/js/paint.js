// The memory map as a picture: lines of tokens, a dot each, scaled up to the room there is.

import { STATES, UNREAD } from "./map.js";

const LINE_PIXELS = [10, 8, 6, 4, 3, 2];
const LEAST_WIDTH = 2; // pixels of a token, where there is room

/**
 * How tokens are laid out: `perLine` beside each other, lines of `pixels`.
 * @returns {{perLine: number, lines: number, pixels: number}}
 */
export function layout(n, width, height) {
  for (const pixels of [...LINE_PIXELS, 1]) {
    const perLine = Math.max(1, Math.ceil(n / Math.max(1, Math.floor(height / pixels))));
    if (pixels === 1 || perLine * LEAST_WIDTH <= width) {
      return { perLine, lines: Math.ceil(n / perLine), pixels };
    }
  }
  throw new Error("no layout"); // the last one always fits
}

/** The colours of the strengths of each state, over the paper: 16 steps, as numbers of ImageData. */
function palette(isDark) {
  const paper = isDark ? [31, 34, 38] : [243, 242, 238];
  const lost = isDark ? [42, 46, 51] : [226, 224, 218];
  const plain = (state) => (state === UNREAD ? paper : lost);
  const colours = new Uint32Array(STATES.length * 16);
  STATES.forEach(({ colour }, state) => {
    for (let step = 0; step < 16; step += 1) {
      const [r, g, b] = [0, 1, 2].map((i) =>
        Math.round(colour ? paper[i] + (colour[i] - paper[i]) * step / 15 : plain(state)[i]));
      colours[state * 16 + step] = 0xff000000 | (b << 16) | (g << 8) | r;
    }
  });
  return colours;
}

/** A picture of the map, a pixel for each token. */
export function pixelsOf(map, perLine, lines, isDark) {
  const image = new ImageData(perLine, Math.max(1, lines));
  const pixels = new Uint32Array(image.data.buffer);
  const colours = palette(isDark);
  for (let i = 0; i < map.n; i += 1) {
    pixels[i] = colours[map.states[i] * 16 + Math.round(15 * map.strength(i))];
  }
  return image;
}

/**
 * Draws a map onto a canvas, whose size is in device pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {import("./map.js").MemoryMap} map
 */
export function paint(canvas, map, isDark = matchMedia("(prefers-color-scheme: dark)").matches) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!map.n) return null;
  const shape = layout(map.n, canvas.width, canvas.height);
  const small = new OffscreenCanvas(shape.perLine, shape.lines);
  small.getContext("2d").putImageData(pixelsOf(map, shape.perLine, shape.lines, isDark), 0, 0);
  context.imageSmoothingEnabled = shape.perLine > canvas.width;
  context.drawImage(small, 0, 0, canvas.width, shape.lines * shape.pixels);
  return shape;
}
