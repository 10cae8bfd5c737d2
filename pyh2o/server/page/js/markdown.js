// Markdown in blocks, as it streams in: what is complete stays as it is, only the last block is made again.

import { copyButton, h } from "./dom.js";
import { inline } from "./inline.js";
import { colour, formula } from "./vendored.js";

// A longer paragraph is shown in parts: one node of megabytes would block the page.
const LONGEST = 16000;
const DEEPEST = 5;
// What is longer is shown as it is: millions of elements would be too much for any browser.
const MOST_MARKED = 1_000_000;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FORMULA = /^ {0,3}(\$\$|\\\[)(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Text that grows, as Markdown in an element. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.tail = ""; // the source of the last block, which may still change
    this.nodes = []; // of that block
    this.pieces = [];
    this.size = 0;
    this.timer = 0;
    this.pause = 0;
  }

  /** Adds text, which is shown soon. The more the last block takes, the rarer it is made again. */
  append(text) {
    this.pieces.push(text);
    this.size += text.length;
    this.timer ||= setTimeout(() => this.show(), this.pause);
  }

  /** Shows all that has been added. */
  show() {
    clearTimeout(this.timer);
    this.timer = 0;
    const begun = performance.now();
    const text = this.tail + this.pieces.join("");
    for (const node of this.nodes) node.remove();
    this.pieces = [];
    this.nodes = [];
    this.tail = "";
    if (this.size > MOST_MARKED) return this.element.append(...paragraphs(text, (part) => [part]));
    const lines = text.split("\n");
    const blocks = parse(lines);
    for (const { nodes } of blocks) this.element.append(...nodes);
    const last = blocks.at(-1);
    this.nodes = last?.nodes ?? [];
    this.tail = lines.slice(last?.from ?? 0).join("\n");
    this.pause = Math.max(16, 10 * (performance.now() - begun));
  }
}

/** A text in paragraphs that a browser can lay out one by one. */
function paragraphs(text, inside) {
  const nodes = [];
  for (let from = 0; from < text.length; from += LONGEST) {
    nodes.push(h("p", { dir: "auto" }, ...inside(text.slice(from, from + LONGEST))));
  }
  return nodes;
}

/** Shows a whole text in an element. */
export function showMarkdown(element, text) {
  element.replaceChildren();
  const markdown = new Markdown(element);
  markdown.append(text);
  markdown.show();
}

/** The blocks of some lines: of each the first line, and the nodes. */
function parse(lines, depth = 0) {
  const blocks = [];
  for (let from = 0; from < lines.length;) {
    if (!lines[from].trim()) {
      from += 1;
      continue;
    }
    const [nodes, end] = block(lines, from, depth);
    blocks.push({ from, nodes });
    from = end;
  }
  return blocks;
}

const nodesOf = (lines, depth) => parse(lines, depth).flatMap(({ nodes }) => nodes);

/** The block that begins at a line: its nodes, and the line behind it. */
function block(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (heading) return [[titled(heading)], at + 1];
  if (FENCE.test(line)) return fence(lines, at);
  if (RULE.test(line)) return [[h("hr")], at + 1];
  if (FORMULA.test(line)) return displayed(lines, at);
  if (QUOTE.test(line) && depth < DEEPEST) return quote(lines, at, depth);
  if (ITEM.test(line) && depth < DEEPEST) return list(lines, at, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) return table(lines, at);
  return paragraph(lines, at);
}

function titled([, marks, text]) {
  // The page has an h1, and each message an h2 for those who listen.
  return h(`h${Math.min(6, marks.length + 2)}`, { dir: "auto" }, ...inline(text));
}

function fence(lines, at) {
  const [, marks, language] = FENCE.exec(lines[at]);
  const isEnd = (line) => line.length >= marks.length && line === marks[0].repeat(line.length);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end].trim())) end += 1;
  const source = lines.slice(at + 1, end).join("\n");
  return [[codeBlock(source, language || "code")], Math.min(end + 1, lines.length)];
}

function codeBlock(source, language) {
  const copy = copyButton(source, { class: "small" });
  const [name, code] = [h("span", {}, language), h("code", {}, source)];
  const head = h("div", { class: "code-head" }, name, copy);
  // The keyboard has to reach what scrolls.
  const pre = h("pre", { tabindex: 0, role: "region", "aria-label": language }, code);
  colour(code, source, language, name);
  return h("div", { class: "code", dir: "ltr" }, head, pre);
}

/** A formula in lines of its own, which has no empty one; what is not closed yet may still be one. */
function displayed(lines, at) {
  const [, open, first] = FORMULA.exec(lines[at]);
  const close = open === "$$" ? "$$" : "\\]";
  const source = [];
  for (let end = at; end < lines.length; end += 1) {
    const line = end === at ? first : lines[end];
    const [before, after] = line.split(close);
    if (after !== undefined) {
      // "." and "," may follow; a formula with more behind it is part of a sentence
      if (after.trim().length > 1) break;
      source.push(before);
      return [[h("p", { class: "formula", dir: "ltr" }, formula(source.join("\n"), true), after.trim())], end + 1];
    }
    if (!line.trim() && end > at) break;
    source.push(line);
    if (end === lines.length - 1) return [paragraphs(lines.slice(at).join("\n"), inline), lines.length];
  }
  return paragraph(lines, at);
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [[h("blockquote", { dir: "auto" }, ...nodesOf(inner, depth + 1))], end];
}

/** A list: items at the same indentation, each with what is indented below it. */
function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isNumbered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (found && found[1].length <= indent.length + 1) {
      if (/\d/.test(found[2]) !== isNumbered) break;
      items.push([found[3]]);
    } else if (lines[end].trim() && (found || /^\s{2,}/.test(lines[end]) || lines[end - 1].trim())) {
      items.at(-1).push(lines[end].replace(/^ {1,4}/, ""));
    } else if (!lines[end].trim() && belongs(lines[end + 1])) {
      items.at(-1).push("");
    } else break;
    end += 1;
  }
  const start = isNumbered ? Number.parseInt(mark, 10) : null;
  return [[h(isNumbered ? "ol" : "ul", { start, dir: "auto" }, ...items.map((item) => listItem(item, depth)))], end];
}

const belongs = (line) => line !== undefined && (ITEM.test(line) || /^\s{2,}\S/.test(line));

function listItem(lines, depth) {
  const nodes = nodesOf(lines, depth + 1);
  const isShort = nodes[0]?.nodeName === "P" && nodes.filter((node) => node.nodeName === "P").length === 1;
  return h("li", {}, ...(isShort ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = [lines[at], ...lines.slice(at + 2, end)].map(cells);
  const row = (tag, values) => h("tr", {}, ...values.map((value) => h(tag, { dir: "auto" }, ...inline(value))));
  const shown = h("table", {}, h("thead", {}, row("th", rows[0])),
    h("tbody", {}, ...rows.slice(1).map((values) => row("td", values))));
  return [[h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, shown)], end];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end]) && end - at < 200) end += 1;
  return [paragraphs(lines.slice(at, end).join("\n"), inline), end];
}

const interrupts = (line) => [HEADING, FENCE, QUOTE, RULE, ITEM, FORMULA].some((each) => each.test(line));
