// Markdown in blocks, as it streams in: what is complete stays as it is, only the last block is made again.

import { copyButton, h } from "./dom.js";

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
  const head = h("div", { class: "code-head" }, h("span", {}, language), copy);
  // The keyboard has to reach what scrolls.
  const pre = h("pre", { tabindex: 0, role: "region", "aria-label": language }, h("code", {}, source));
  return h("div", { class: "code", dir: "ltr" }, head, pre);
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

const interrupts = (line) => [HEADING, FENCE, QUOTE, RULE, ITEM].some((each) => each.test(line));

// Markdown inside a line: code, bold, italic, struck, links. It makes text nodes and a few elements only.

// How far behind a mark its partner is looked for, so that hostile text stays cheap.
const REACH = 2000;
const MOST_MARKS = 6;
const SPECIAL = /[\\`*_~[!<h]/g;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const ADDRESS = /https?:\/\/[^\s<>"'`]+/iy;
const LINK = /!?\[([^\]\n]{0,500})\]\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()<>]*\))?)>?(?:\s+"[^"\n]{0,200}")?\s*\)/y;

/** The nodes of a text. */
function inline(text, depth = 0) {
  const nodes = [];
  let plain = 0;
  let at = 0;
  const take = (node, end) => {
    if (at > plain) nodes.push(document.createTextNode(text.slice(plain, at)));
    if (node) nodes.push(node);
    at = plain = end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    at = found.index;
    const [node, end] = depth < MOST_MARKS ? special(text, at, depth) : [null, 0];
    if (end) take(node, end);
    else at += 1;
  }
  at = text.length;
  take(null, at);
  return nodes;
}

/** What begins at a special character: a node and its end, or an end of 0 if it is plain text. */
function special(text, at, depth) {
  const character = text[at];
  if (character === "\\") return escaped(text, at);
  if (character === "`") return code(text, at);
  if (character === "[" || character === "!") return link(text, at, depth);
  if (character === "h" || character === "<") return address(text, at);
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const end = partner(text, at, mark);
    if (end) return [h(tag, {}, ...inline(text.slice(at + mark.length, end), depth + 1)), end + mark.length];
  }
  return [null, 0];
}

function escaped(text, at) {
  const next = text[at + 1] ?? "";
  return /[\\`*_~[\]()#+\-.!>|]/.test(next) ? [document.createTextNode(next), at + 2] : [null, 0];
}

function code(text, at) {
  let open = at;
  while (text[open] === "`") open += 1;
  const fence = text.slice(at, open);
  const end = text.slice(open, open + REACH).indexOf(fence);
  if (end < 0) return [document.createTextNode(fence), open];
  return [h("code", {}, text.slice(open, open + end).trim()), open + end + fence.length];
}

/** Where a mark is closed; 0 if it is none. */
function partner(text, at, mark) {
  const begin = at + mark.length;
  const isInWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
  if (isInWord || /\s/.test(text[begin] ?? " ")) return 0;
  const near = text.slice(begin, begin + REACH);
  for (let end = near.indexOf(mark, 1); end > 0; end = near.indexOf(mark, end + 1)) {
    const behind = near[end + mark.length] ?? "";
    if (/\s/.test(near[end - 1])) continue;
    if (mark[0] === "_" && /\w/.test(behind)) continue;
    if (mark.length === 1 && (behind === mark || near[end - 1] === mark)) continue;
    return begin + end;
  }
  return 0;
}

function link(text, at, depth) {
  LINK.lastIndex = at;
  const found = LINK.exec(text);
  if (!found) return [null, 0];
  const [whole, label, target] = found;
  const isPicture = whole[0] === "!";
  // A picture is never fetched: that would tell another host who reads this.
  const shown = isPicture ? [label || "picture"] : inline(label, depth + 1);
  return [anchor(target, shown), at + whole.length];
}

function address(text, at) {
  const begin = text[at] === "<" ? at + 1 : at;
  ADDRESS.lastIndex = begin;
  const found = ADDRESS.exec(text);
  if (!found) return [null, 0];
  const target = found[0].replace(/[.,;:!?)\]*_~]+$/, "");
  const isClosed = begin > at && text[begin + target.length] === ">";
  return [anchor(target, [target]), begin + target.length + (isClosed ? 1 : 0)];
}

/** A link that says which host it leads to; what is no address of the web stays text. */
function anchor(target, shown) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return h("span", {}, ...shown);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return h("span", {}, ...shown);
  return h("a", { href: url.href, rel: "noopener noreferrer", target: "_blank", title: url.href }, ...shown);
}
