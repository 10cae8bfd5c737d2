// Converts Markdown to HTML with marked, formulas and <details>, and sanitises it with DOMPurify (../vendor/README.md).

import "../vendor/marked/marked.min.js";
import DOMPurify from "../vendor/dompurify/purify.es.mjs";

// Limits the time for malicious text: longer paragraphs are split, deeper quotes and lists stay text.
const MAX_LENGTH = 8000;
const MAX_DEPTH = 6;

const FORMULA_LINE = /\n {0,3}(?:\$\$|\\\[)/;
const FORMULA_OPEN = /^ {0,3}(\$\$|\\\[)/;
const FORMULA = /^(?:\\\((.{1,2000}?)\\\)|(?:\\\[(.{1,2000}?)\\\]|\$\$(.{1,2000}?)\$\$))/s;
// Dollars around a formula, but not in prices and variables.
const DOLLARS = /^\$(?![\s$]|[\d.,]+\s+[a-z]{2})((?:\\.|[^\\$]){1,2000})(?<!\s)\$(?!\w)/is;
const DETAILS = /^ {0,3}<details(?: open)?>\s*(?:<summary>(.*?)<\/summary>)?(.*?)(?:<\/details>[ \t]*(?:\n|$)|$)/s;
const TAG = /^<(?:br ?\/?|\/?(?:kbd|mark|sub|sup))>/i;
// Line breaks between tags, which shading would wrap in spans.
const BETWEEN_TAGS = /(<\/?(?:blockquote|details|h\d|hr|li|ol|p|pre|table|tbody|td|th|thead|tr|ul)\b[^>]*>)\n/g;
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

/** marked's lexer with limits for length and depth. */
class BoundedLexer extends Lexer {
  depth = 0;

  blockTokens(source, tokens = [], isClipped = false) {
    if (this.depth === MAX_DEPTH) {
      tokens.push({ type: "text", raw: source, text: source, tokens: this.inline(source) });
      return tokens;
    }
    this.depth += 1;
    super.blockTokens(source, tokens, isClipped);
    this.depth -= 1;
    return tokens;
  }

  inlineTokens(source, tokens = []) {
    if (source.length <= MAX_LENGTH) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: escape(source) });
    return tokens;
  }
}

const { del, inlineText, paragraph } = Tokenizer.prototype;
const tokenizer = {
  paragraph(source) {
    const end = source.length > MAX_LENGTH ? source.lastIndexOf(" ", MAX_LENGTH) : 0;
    const near = source.slice(0, end > 0 ? end : MAX_LENGTH);
    const formula = near.search(FORMULA_LINE);
    return paragraph.call(this, formula < 0 ? near : near.slice(0, formula + 1));
  },
  inlineText(source) {
    const dollar = source.indexOf("$", 1);
    return inlineText.call(this, dollar < 0 ? source : source.slice(0, dollar));
  },
  // A single tilde does not strike through: people write ~5 and 3~4.
  del(source) {
    return source.startsWith("~~") ? del.call(this, source) : undefined;
  },
  // Only the tags in TAG are HTML, all others are text.
  html: () => undefined,
  tag(source) {
    const [raw] = TAG.exec(source) ?? [];
    return raw && { type: "html", raw, text: raw };
  },
  // Link definitions would change links that are already shown, and "---" after a line is meant as a rule.
  def: () => undefined,
  lheading: () => undefined,
};

/** Parses a formula on separate lines. An unclosed one is a paragraph while more text may close it. */
function displayed(source) {
  const opened = FORMULA_OPEN.exec(source);
  if (!opened) return undefined;
  const [near] = source.slice(0, MAX_LENGTH).split(/\n[ \t]*\n/, 1);
  const close = opened[1] === "$$" ? "$$" : "\\]";
  const from = opened[0].length;
  const end = near.indexOf(close, from);
  if (end < 0 && near === source) return { type: "paragraph", raw: near, text: near, tokens: this.lexer.inline(near) };
  if (end < 0) return undefined;
  const [rest] = /^.*\n?/.exec(near.slice(end + 2));
  // "." or "," may follow; a formula before other text is part of a sentence.
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
  // The page has an h1, and each message an h2 for screen readers, so Markdown starts at h3.
  heading({ depth, tokens }) {
    const tag = `h${Math.min(6, depth + 2)}`;
    return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>\n`;
  },
  // Loading a picture would contact another host.
  image: ({ href, text }) => `<a href="${escape(href).replaceAll('"', "%22")}">${escape(text) || "picture"}</a>`,
  checkbox: ({ checked }) => `<span class="box">${checked ? "☑" : "☐"}</span>`,
};

const markdown = new Marked({ tokenizer, renderer, extensions });

/** Parses a text into tokens; the top-level ones are blocks. */
export const lex = (text) => new BoundedLexer(markdown.defaults).lex(text);

/** Renders tokens to a sanitised fragment. */
export const fragmentOf = (tokens) => DOMPurify.sanitize(markdown.parser(tokens).replace(BETWEEN_TAGS, "$1"), SAFE);
