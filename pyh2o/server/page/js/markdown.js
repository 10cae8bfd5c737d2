// Streamed Markdown: complete blocks keep their elements, only the last ones are rendered again.

import { copyButton, h } from "./dom.js";
import { fragmentOf, lex } from "./syntax.js";
import { formula, highlight } from "./vendored.js";

// Longer text is shown without formatting: browsers are too slow with millions of elements.
const MAX_FORMATTED = 200_000;
const MAX_PARAGRAPH = 16_000;
// More text after a last line without letters may change the blocks before it: "2" becomes "2. item", and "|--" a table.
const AMBIGUOUS = /(?:^|\n)[^\p{L}\n]*$/u;
const OF_ANY_DIRECTION = "blockquote, h3, h4, h5, h6, ol, p, summary, td, th, ul";

/** Shows growing Markdown in an element. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.tail = ""; // source of the last blocks, which may still change
    this.nodes = []; // of those blocks
    this.pending = [];
    this.size = 0;
    this.timer = 0;
    this.pause = 0;
  }

  /** Adds text. The longer the last blocks take to render, the longer the pause before they are rendered again. */
  append(text) {
    this.pending.push(text);
    this.size += text.length;
    this.timer ||= setTimeout(() => this.show(), this.pause);
  }

  /** Renders all text that was added. */
  show() {
    clearTimeout(this.timer);
    this.timer = 0;
    const startedAt = performance.now();
    const text = this.tail + this.pending.join("");
    for (const node of this.nodes) node.remove();
    this.pending = [];
    this.nodes = [];
    this.tail = "";
    if (this.size > MAX_FORMATTED) return this.element.append(...plain(text));
    const tokens = lex(text);
    const nodes = rendered(tokens);
    this.element.append(...nodes);
    const open = tokens.filter(({ type }) => type !== "space").slice(AMBIGUOUS.test(text) ? -3 : -1);
    this.tail = tokens.slice(Math.max(0, tokens.indexOf(open[0]))).map(({ raw }) => raw).join("");
    this.nodes = nodes.slice(-open.length);
    if (!text.endsWith(this.tail)) [this.tail, this.nodes] = [text, nodes]; // marked has normalised the source
    this.pause = Math.max(16, 10 * (performance.now() - startedAt));
  }
}

/** Shows a complete text in an element. */
export function showMarkdown(element, text) {
  element.replaceChildren();
  const markdown = new Markdown(element);
  markdown.append(text);
  markdown.show();
}

/** Splits a text into paragraphs that a browser can lay out separately. */
function plain(text) {
  return Array.from({ length: Math.ceil(text.length / MAX_PARAGRAPH) }, (_, i) =>
    h("p", { dir: "auto" }, text.slice(i * MAX_PARAGRAPH, (i + 1) * MAX_PARAGRAPH)));
}

/** Renders tokens, one node per block. */
function rendered(tokens) {
  const root = fragmentOf(tokens);
  for (const each of root.querySelectorAll(OF_ANY_DIRECTION)) each.dir = "auto";
  for (const each of root.querySelectorAll("pre")) each.replaceWith(codeBlock(each.firstChild));
  for (const each of root.querySelectorAll(".math")) {
    each.replaceWith(formula(each.textContent, each.classList.contains("display")));
  }
  for (const each of root.querySelectorAll("a")) prepareLink(each);
  // Focusable, so that the keyboard can scroll it.
  for (const each of root.querySelectorAll("table")) {
    const scroller = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" });
    each.replaceWith(scroller);
    scroller.append(each);
  }
  return [...root.children];
}

/** Shows code below its language and a copy button. */
function codeBlock(code) {
  const source = code.textContent.replace(/\n$/, "");
  const language = code.className.replace("language-", "") || "code";
  const name = h("span", {}, language);
  const head = h("div", { class: "code-head" }, name, copyButton(source, { class: "small" }));
  const shown = h("code", {}, source);
  highlight(shown, source, language, name);
  return h("div", { class: "code", dir: "ltr" }, head,
    h("pre", { tabindex: 0, role: "region", "aria-label": language }, shown));
}

/** Shows a link's address as its title; replaces links without a valid address by their text. */
function prepareLink(link) {
  if (!URL.canParse(link.getAttribute("href"))) return link.replaceWith(...link.childNodes);
  Object.assign(link, { rel: "noopener noreferrer", target: "_blank", title: link.href });
}
