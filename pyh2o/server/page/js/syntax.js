// Markdown to HTML by marked, with formulas and <details>, and made safe by DOMPurify (../vendor/README.md).

import "../vendor/marked/marked.min.js";
import DOMPurify from "../vendor/dompurify/purify.es.mjs";

// Bounds the time that hostile text takes: longer paragraphs are split, deeper quotes and lists stay text.
const LONGEST = 8000;
const DEEPEST = 6;

const FORMULA_LINE = /\n {0,3}(?:\$\$|\\\[)/;
const FORMULA_OPEN = /^ {0,3}(\$\$|\\\[)/;
const FORMULA = /^(?:\\\((.{1,2000}?)\\\)|(?:\\\[(.{1,2000}?)\\\]|\$\$(.{1,2000}?)\$\$))/s;
// A pair of dollars around a formula, as opposed to prices and variables.
const DOLLARS = /^\$(?![\s$]|[\d.,]+\s+[a-z]{2})((?:\\.|[^\\$]){1,2000})(?<!\s)\$(?!\w)/is;
const DETAILS = /^ {0,3}<details(?: open)?>\s*(?:<summary>(.*?)<\/summary>)?(.*?)(?:<\/details>[ \t]*(?:\n|$)|$)/s;
const TAG = /^<(?:br ?\/?|\/?(?:kbd|mark|sub|sup))>/i;
// The shading of tokens would put spans between rows and items.
const BETWEEN = /(<\/?(?:blockquote|details|h\d|hr|li|ol|p|pre|table|tbody|td|th|thead|tr|ul)\b[^>]*>)\n/g;
const SAFE = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "details", "em", "h3", "h4", "h5", "h6", "hr", "kbd", "li", "mark", "ol",
    "p", "pre", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^https?:/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const { Lexer, Marked, Tokenizer } = globalThis.marked;
const escape = (text) => text.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt(0)};`);

/** The lexer of marked, in bounded time and depth. */
class Bounded extends Lexer {
  depth = 0;

  blockTokens(source, tokens = [], isClipped = false) {
    if (this.depth === DEEPEST) {
      tokens.push({ type: "text", raw: source, text: source, tokens: this.inline(source) });
      return tokens;
    }
    this.depth += 1;
    super.blockTokens(source, tokens, isClipped);
    this.depth -= 1;
    return tokens;
  }

  inlineTokens(source, tokens = []) {
    if (source.length <= LONGEST) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: escape(source) });
    return tokens;
  }
}

const { del, inlineText, paragraph } = Tokenizer.prototype;
const tokenizer = {
  paragraph(source) {
    const end = source.length > LONGEST ? source.lastIndexOf(" ", LONGEST) : 0;
    const near = source.slice(0, end > 0 ? end : LONGEST);
    const formula = near.search(FORMULA_LINE);
    return paragraph.call(this, formula < 0 ? near : near.slice(0, formula + 1));
  },
  inlineText(source) {
    const dollar = source.indexOf("$", 1);
    return inlineText.call(this, dollar < 0 ? source : source.slice(0, dollar));
  },
  // A single tilde is no mark: people write ~5 and 3~4.
  del(source) {
    return source.startsWith("~~") ? del.call(this, source) : undefined;
  },
  // A few tags have an effect, all others are text.
  html: () => undefined,
  tag(source) {
    const [raw] = TAG.exec(source) ?? [];
    return raw && { type: "html", raw, text: raw };
  },
  // Definitions would change links that have been shown, and "---" after a line is meant as a rule.
  def: () => undefined,
  lheading: () => undefined,
};

/** A formula in lines of its own. An unclosed one is a paragraph as long as more text may close it. */
function displayed(source) {
  const opened = FORMULA_OPEN.exec(source);
  if (!opened) return undefined;
  const [near] = source.slice(0, LONGEST).split(/\n[ \t]*\n/, 1);
  const close = opened[1] === "$$" ? "$$" : "\\]";
  const from = opened[0].length;
  const end = near.indexOf(close, from);
  if (end < 0 && near === source) return { type: "paragraph", raw: near, text: near, tokens: this.lexer.inline(near) };
  if (end < 0) return undefined;
  const [rest] = /^.*\n?/.exec(near.slice(end + 2));
  // "." and "," may follow; a formula before more text is part of a sentence.
  if (rest.trim().length > 1) return undefined;
  return { type: "displayed", raw: near.slice(0, end + 2) + rest, text: near.slice(from, end), after: rest.trim() };
}

const math = (text, more = "") => `<span class="math${more}">${escape(text)}</span>`;

const extensions = [
  {
    name: "displayed",
    level: "block",
    tokenizer: displayed,
    renderer: ({ text, after }) => `<p class="formula">${math(text, " display")}${escape(after)}</p>\n`,
  },
  {
    name: "formula",
    level: "inline",
    tokenizer(source) {
      const [raw, inLine, ...inLines] = FORMULA.exec(source) ?? DOLLARS.exec(source) ?? [];
      const text = inLine ?? inLines.find(Boolean);
      return raw && { type: "formula", raw, text, isDisplay: inLine === undefined };
    },
    renderer: ({ text, isDisplay }) => math(text, isDisplay ? " display" : ""),
  },
  {
    name: "details",
    level: "block",
    tokenizer(source) {
      const [raw, title = "Details", inside] = DETAILS.exec(source) ?? [];
      return raw && { type: "details", raw, title: this.lexer.inlineTokens(title), tokens: this.lexer.blockTokens(inside, []) };
    },
    renderer({ title, tokens }) {
      return `<details><summary>${this.parser.parseInline(title)}</summary>${this.parser.parse(tokens)}</details>\n`;
    },
  },
];

const renderer = {
  // The page has an h1, and each message an h2 for screen readers.
  heading({ depth, tokens }) {
    const tag = `h${Math.min(6, depth + 2)}`;
    return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>\n`;
  },
  // Loading a picture would tell another host who reads this.
  image: ({ href, text }) => `<a href="${escape(href).replaceAll('"', "%22")}">${escape(text) || "picture"}</a>`,
  checkbox: ({ checked }) => `<span class="box">${checked ? "☑" : "☐"}</span>`,
};

const markdown = new Marked({ tokenizer, renderer, extensions });

/** The tokens of a text; those of its top level are its blocks. */
export const lex = (text) => new Bounded(markdown.defaults).lex(text);

/** A fragment of the document with these tokens. */
export const fragmentOf = (tokens) => DOMPurify.sanitize(markdown.parser(tokens).replace(BETWEEN, "$1"), SAFE);
