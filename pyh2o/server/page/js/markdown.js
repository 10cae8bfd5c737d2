// Streamed Markdown: complete blocks stay as they are, only the last ones are rendered again.

import { copyButton, h } from "./dom.js";
import { fragmentOf, lex } from "./syntax.js";
import { colour, formula } from "./vendored.js";

// Longer text is shown without its formatting: no browser has room for millions of elements.
const MOST_MARKED = 200_000;
const LONGEST = 16_000;
// A last line without letters may change the blocks before: "2" becomes "2. item", and "|--" a table.
const AMBIGUOUS = /(?:^|\n)[^\p{L}\n]*$/u;
const OF_ANY_DIRECTION = "blockquote, h3, h4, h5, h6, ol, p, summary, td, th, ul";

/** Text that grows, as Markdown in an element. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.tail = ""; // the source of the last blocks, which may still change
    this.nodes = []; // of those blocks
    this.pieces = [];
    this.size = 0;
    this.timer = 0;
    this.pause = 0;
  }

  /** Adds text, which is shown soon. The more time the last blocks take, the rarer they are rendered again. */
  append(text) {
    this.pieces.push(text);
    this.size += text.length;
    this.timer ||= setTimeout(() => this.show(), this.pause);
  }

  /** Shows all text that has been added. */
  show() {
    clearTimeout(this.timer);
    this.timer = 0;
    const begun = performance.now();
    const text = this.tail + this.pieces.join("");
    for (const node of this.nodes) node.remove();
    this.pieces = [];
    this.nodes = [];
    this.tail = "";
    if (this.size > MOST_MARKED) return this.element.append(...plain(text));
    const tokens = lex(text);
    const nodes = rendered(tokens);
    this.element.append(...nodes);
    const open = tokens.filter(({ type }) => type !== "space").slice(AMBIGUOUS.test(text) ? -3 : -1);
    this.tail = tokens.slice(Math.max(0, tokens.indexOf(open[0]))).map(({ raw }) => raw).join("");
    this.nodes = nodes.slice(-open.length);
    if (!text.endsWith(this.tail)) [this.tail, this.nodes] = [text, nodes]; // marked changed the source
    this.pause = Math.max(16, 10 * (performance.now() - begun));
  }
}

/** Shows a whole text in an element. */
export function showMarkdown(element, text) {
  element.replaceChildren();
  const markdown = new Markdown(element);
  markdown.append(text);
  markdown.show();
}

/** A text in paragraphs that a browser can lay out one by one. */
function plain(text) {
  const parts = Array.from({ length: Math.ceil(text.length / LONGEST) }, (_, i) => text.slice(i * LONGEST, (i + 1) * LONGEST));
  return parts.map((part) => h("p", { dir: "auto" }, part));
}

/** The nodes of some tokens, one for each block. */
function rendered(tokens) {
  const root = fragmentOf(tokens);
  for (const each of root.querySelectorAll(OF_ANY_DIRECTION)) each.dir = "auto";
  for (const each of root.querySelectorAll("pre")) each.replaceWith(codeBlock(each.firstChild));
  for (const each of root.querySelectorAll(".math")) {
    each.replaceWith(formula(each.textContent, each.classList.contains("display")));
  }
  for (const each of root.querySelectorAll("a")) showTarget(each);
  // The keyboard has to reach what scrolls.
  for (const each of root.querySelectorAll("table")) {
    const scroller = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" });
    each.replaceWith(scroller);
    scroller.append(each);
  }
  return [...root.children];
}

/** Code under its language and a button that copies it. */
function codeBlock(code) {
  const source = code.textContent.replace(/\n$/, "");
  const language = code.className.replace("language-", "") || "code";
  const name = h("span", {}, language);
  const head = h("div", { class: "code-head" }, name, copyButton(source, { class: "small" }));
  const shown = h("code", {}, source);
  colour(shown, source, language, name);
  return h("div", { class: "code", dir: "ltr" }, head,
    h("pre", { tabindex: 0, role: "region", "aria-label": language }, shown));
}

/** Says where a link leads; what is no address of the web stays text. */
function showTarget(link) {
  if (!URL.canParse(link.getAttribute("href"))) return link.replaceWith(...link.childNodes);
  Object.assign(link, { rel: "noopener noreferrer", target: "_blank", title: link.href });
}
