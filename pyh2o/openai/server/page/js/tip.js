// What is known of the token under the pointer or with the focus, and the keys that go along the tokens.

import * as api from "./api.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { announce } from "./live.js";

const REST_MS = 150;

export class Tip {
  /** @param {(position: number) => void} togglePin */
  constructor(togglePin) {
    this.name = "";
    this.togglePin = togglePin;
    this.element = h("div", { id: "tip", role: "tooltip", hidden: true });
    document.body.append(this.element);
    document.addEventListener("pointerover", ({ target }) => this.at(target.closest?.("[data-p]")));
    document.addEventListener("focusin", ({ target }) => this.at(target.closest?.("[data-p]")));
    document.addEventListener("keydown", (event) => this.onKey(event), true);
    document.addEventListener("scroll", () => this.at(null), true);
  }

  at(token) {
    if (token === this.token) return;
    this.token = token;
    clearTimeout(this.timer);
    this.element.hidden = true;
    if (token) this.timer = setTimeout(() => this.show(token), REST_MS);
  }

  async show(token) {
    const known = await api.token(this.name, Number(token.dataset.p)).catch(() => null);
    if (!known || this.token !== token) return;
    const lines = describe(known);
    this.element.replaceChildren(...lines.map((line) => h("div", {}, line)));
    this.element.hidden = false;
    const { left, bottom, top } = token.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.element;
    const isLow = bottom + offsetHeight + 12 > innerHeight;
    this.element.style.left = `${Math.max(8, Math.min(left, innerWidth - offsetWidth - 8))}px`;
    this.element.style.top = `${isLow ? top - offsetHeight - 6 : bottom + 6}px`;
    if (document.activeElement === token) announce(lines.join(" "));
  }

  onKey(event) {
    if (event.key === "Escape" && !this.element.hidden) {
      event.stopPropagation();
      return this.at(null);
    }
    const token = event.target.closest?.("[data-p]");
    const isShaded = event.target.closest?.(".tokens, .scroller")?.querySelector?.("[data-p]");
    if (!isShaded || event.ctrlKey || event.altKey || event.metaKey) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      const next = token ? neighbour(token, step) : inSight(event.target);
      event.preventDefault();
      event.stopPropagation();
      next?.focus();
    } else if (event.key === "p" && token) {
      this.togglePin(Number(token.dataset.p));
    }
  }
}

/** The token beside one, which may lie in the next paragraph or message. */
function neighbour(token, step) {
  const beside = step > 0 ? token.nextElementSibling : token.previousElementSibling;
  if (beside?.dataset.p) return beside;
  const all = [...token.closest(".scroller").querySelectorAll("[data-p]")];
  return all[all.indexOf(token) + step];
}

function inSight(scroller) {
  const { top } = scroller.getBoundingClientRect();
  return [...scroller.querySelectorAll("[data-p]")].find((token) => token.getBoundingClientRect().top >= top);
}

/** A token in lines of words. */
function describe({ position, text, score, rows, pairs, held, recent, pinned, archived, recalled, evicted_at, recalled_at }) {
  const lines = [`Token ${count(position)}: ${JSON.stringify(text)}`];
  const states = [pinned && "pinned", recent && "recent", recalled && "recalled", archived && "in the archive"].filter(Boolean);
  if (states.length) lines.push(`It is ${states.join(", ")}.`);
  lines.push(rows ? `Held by ${count(rows)} of ${count(pairs)} pairs of layer and head.` : "No layer and head holds it.");
  if (rows && held?.length && held.length <= 6) {
    lines.push(`Layer and head: ${held.map(([layer, head]) => `${layer}·${head}`).join(", ")}.`);
  }
  if (score !== null && score !== undefined) lines.push(`Score ${score.toPrecision(3)}.`);
  if (evicted_at !== null && evicted_at !== undefined) lines.push(`Evicted when the text had ${count(evicted_at)} tokens.`);
  if (recalled_at !== null && recalled_at !== undefined) lines.push(`Recalled at ${count(recalled_at)} tokens.`);
  return lines;
}
