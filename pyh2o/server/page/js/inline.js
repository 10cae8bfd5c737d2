// Markdown inside a line: code, formulas, bold, italic, struck, links. It makes text nodes and a few elements only.

import { h } from "./dom.js";
import { formula } from "./vendored.js";

// How far behind a mark its partner is looked for, so that hostile text stays cheap.
const REACH = 2000;
const MOST_MARKS = 6;
const PRICE = /^\$[\d.,]+\s+[a-z]{2}/i;
const SPECIAL = /[\\`*_~[!<h$]/g;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const ADDRESS = /https?:\/\/[^\s<>"'`]+/iy;
const LINK = /!?\[([^\]\n]{0,500})\]\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()<>]*\))?)>?(?:\s+"[^"\n]{0,200}")?\s*\)/y;

/** The nodes of a text. */
export function inline(text, depth = 0) {
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
  if (character === "\\") return closed(text, at, "\\(", "\\)") ?? closed(text, at, "\\[", "\\]") ?? escaped(text, at);
  if (character === "$") return closed(text, at, "$$", "$$") ?? dollars(text, at);
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
  return /[\\`*_~[\]()#+\-.!>|$]/.test(next) ? [document.createTextNode(next), at + 2] : [null, 0];
}

/** A formula between two marks; null if it is none. */
function closed(text, at, open, close) {
  if (!text.startsWith(open, at)) return null;
  const begin = at + open.length;
  const size = text.slice(begin, begin + REACH).indexOf(close);
  return size > 0 ? [formula(text.slice(begin, begin + size), open !== "\\("), begin + size + close.length] : null;
}

/** A formula between two dollars, which are no prices and no variables. */
function dollars(text, at) {
  if (/[\s$]/.test(text[at + 1] ?? " ") || PRICE.test(text.slice(at, at + 40))) return [null, 0];
  const near = text.slice(at + 1, at + 1 + REACH);
  for (let end = near.indexOf("$"); end > 0; end = near.indexOf("$", end + 1)) {
    if (near[end - 1] === "\\") continue;
    const isPrice = /\s/.test(near[end - 1]) || /\w/.test(near[end + 1] ?? "");
    return isPrice ? [null, 0] : [formula(near.slice(0, end), false), at + end + 2];
  }
  return [null, 0];
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
