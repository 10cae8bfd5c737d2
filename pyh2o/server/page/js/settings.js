// The system prompt, what else the model is told, and how tokens are drawn.

import { ask, counted, h } from "./dom.js";
import { ofBrowser } from "./storage.js";

const MOST_TOKENS = "pyh2o-max-tokens";

// name, label, what it does, least, most, step (1: whole numbers), what the page gives if nothing was set; null leaves it
// to the server, which draws a seed for each session
const FIELDS = [
  ["temperature", "Temperature", "0 always takes the likeliest token", 0, null, 0.05, 0.8],
  ["top_p", "Top p", "draw from the likeliest tokens of this probability together; 1 is off", 0, 1, 0.01, 0.95],
  ["top_k", "Top k", "draw from so many of the likeliest tokens; 0 is off", 0, null, 1, 40],
  ["min_p", "Min p", "drop tokens below this share of the likeliest one; 0 is off", 0, 1, 0.01, 0.05],
  ["typical_p", "Typical p", "draw from tokens about as surprising as expected, of this probability together; 1 is off", 0, 1, 0.01, 1],
  ["xtc_probability", "XTC", "how often all likely tokens but the least likely are dropped; 0 is off", 0, 1, 0.01, 0],
  ["xtc_threshold", "XTC threshold", "from this probability on a token is likely", 0, 1, 0.01, 0.1],
  ["dry_multiplier", "DRY", "weakens what would prolong a repetition, by 0.8, say; 0 is off", 0, 100, 0.05, 0],
  ["repeat_penalty", "Repeat penalty", "weakens what was just said; 1 is off", 0.01, null, 0.01, 1.1],
  ["seed", "Seed", "the same seed after the same text draws the same", 0, 4294967294, 1, null],
];

/** The most tokens of an answer in this browser; none if nobody limited it. */
export function maxTokens() {
  const saved = Number(ofBrowser.get(MOST_TOKENS));
  return saved > 0 ? { max_tokens: saved } : {};
}

/** What a session begins with where nothing was set. */
export function defaults() {
  return Object.fromEntries(FIELDS.map((field) => [field[0], field[6]]).filter(([, value]) => value !== null));
}

/** Asks for settings, of which stories have no system prompt; returns what has changed, null for nothing. */
export async function askSettings(now, isStory) {
  const system = h("textarea", { rows: 4, dir: "auto", value: now.system ?? "" });
  const { value: before } = system; // as a box holds it
  const inputs = FIELDS.map((field) => numberInput(field, now.sampling?.[field[0]]));
  const most = h("input", { type: "number", min: 1, step: 1, value: maxTokens().max_tokens ?? "", placeholder: "no limit" });
  const note = h("textarea", { rows: 2, dir: "auto", value: now.note ?? "" });
  const { value: noteBefore } = note;
  const lorebook = h("input", { type: "file", accept: ".json,application/json" });
  const agreed = await ask("Settings", [
    isStory ? "" : h("label", { class: "field" }, "System prompt", system,
      h("small", {}, "What the model is told before all messages; it stays in the cache. A new one is read with the next message.")),
    h("label", { class: "field" }, "Author's note", note, h("small", {}, isStory
      ? "What the model is told where each passage begins; no part of the text." : "What the model is told again every few messages.")),
    h("label", { class: "field" }, "Lorebook", lorebook,
      h("small", {}, `${now.lorebook ? "One is chosen." : `${counted(now.lore_entries ?? 0, "entry", "entries")} now.`} What the model is told when a key comes up: a JSON of SillyTavern or koboldcpp.`)),
    h("div", { class: "fields" },
      ...FIELDS.map(([, label, what], i) => h("label", { class: "field" }, label, inputs[i], h("small", {}, what))),
      h("label", { class: "field" }, "Max tokens", most, h("small", {}, "of an answer or a passage, in this browser"))),
  ].filter(Boolean), "Save", { wide: true });
  if (!agreed) return null;
  ofBrowser.set(MOST_TOKENS, most.value);
  const sampling = { ...now.sampling };
  FIELDS.forEach(([name], i) => {
    if (inputs[i].value) sampling[name] = Number(inputs[i].value);
    else delete sampling[name];
  });
  const [book] = lorebook.files;
  const isOther = FIELDS.some(([name]) => sampling[name] !== now.sampling?.[name]);
  return {
    ...(isOther ? { sampling } : {}),
    // Another system prompt has all be read again, so the same one is not sent; "" is none.
    ...(system.value === before ? {} : { system: system.value.trim() }),
    ...(note.value === noteBefore ? {} : { note: note.value.trim() }),
    ...(book ? { lorebook: await jsonOf(book) } : {}),
  };
}

async function jsonOf(file) {
  try {
    return JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is no lorebook: choose a JSON of SillyTavern or koboldcpp`);
  }
}

function numberInput([, , , min, max, step, fallback], value) {
  // A smaller step would refuse what was set elsewhere, such as a temperature of 0.777.
  return h("input", { type: "number", min, max, step: step < 1 ? "any" : step, required: fallback !== null,
    placeholder: fallback === null ? "one of its own" : null, value: value ?? fallback ?? "" });
}
