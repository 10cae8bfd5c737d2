// The settings dialog: system prompt, author's note, lorebook, sampling.

import { ask, h, plural } from "./dom.js";
import { browserStorage } from "./storage.js";

const MAX_TOKENS = "pyh2o-max-tokens";

// name, label, explanation, minimum, maximum, step (1: integers), default; a default of null is chosen by the server
const FIELDS = [
  ["temperature", "Temperature", "0 always samples the most likely token", 0, null, 0.05, 0.8],
  ["top_p", "Top p", "sample from the most likely tokens whose probabilities sum to this; 1 is off", 0, 1, 0.01, 0.95],
  ["top_k", "Top k", "sample from this many of the most likely tokens; 0 is off", 0, null, 1, 40],
  ["min_p", "Min p", "minimum probability relative to the most likely token; 0 is off", 0, 1, 0.01, 0.05],
  ["typical_p", "Typical p", "sample from the most typical tokens whose probabilities sum to this; 1 is off", 0, 1, 0.01, 1],
  ["xtc_probability", "XTC", "probability of removing all likely tokens except the least likely of them; 0 is off", 0, 1, 0.01, 0],
  ["xtc_threshold", "XTC threshold", "minimum probability of a likely token", 0, 1, 0.01, 0.1],
  ["dry_multiplier", "DRY", "penalty for tokens that extend a repetition, for example 0.8; 0 is off", 0, 100, 0.05, 0],
  ["repeat_penalty", "Repeat penalty", "penalty for recent tokens; 1 is off", 0.01, null, 0.01, 1.1],
  ["seed", "Seed", "the same seed and text give the same answer", 0, 4294967294, 1, null],
];

/** The limit of an answer that is set in this browser, as a field of a request. */
export function maxTokens() {
  const saved = Number(browserStorage.get(MAX_TOKENS));
  return saved > 0 ? { max_tokens: saved } : {};
}

/** The sampling settings of a new session. */
export function defaults() {
  return Object.fromEntries(FIELDS.map((field) => [field[0], field[6]]).filter(([, value]) => value !== null));
}

/** Shows the dialog and returns the changed fields, null if it is cancelled. */
export async function askSettings(now, isStory) {
  const system = h("textarea", { rows: 4, dir: "auto", value: now.system ?? "" });
  const { value: before } = system; // with line breaks as a textarea normalises them
  const inputs = FIELDS.map((field) => numberInput(field, now.sampling?.[field[0]]));
  const limit = h("input", { type: "number", min: 1, step: 1, value: maxTokens().max_tokens ?? "", placeholder: "no limit" });
  const note = h("textarea", { rows: 2, dir: "auto", value: now.note ?? "" });
  const { value: noteBefore } = note;
  const lorebook = h("input", { type: "file", accept: ".json,application/json" });
  const agreed = await ask("Settings", [
    isStory ? "" : h("label", { class: "field" }, "System prompt", system,
      h("small", {}, "Instructions before all messages, never evicted. After a change, the next message reads the whole text again.")),
    h("label", { class: "field" }, "Author's note", note, h("small", {}, isStory
      ? "Instructions for the model near the end of the text, not part of the story." : "Instructions that the model gets again every few messages.")),
    h("label", { class: "field" }, "Lorebook", lorebook,
      h("small", {}, `${now.lorebook ? "One is selected." : `${plural(now.lore_entries ?? 0, "entry", "entries")} now.`} Information that the model gets when a keyword occurs: a JSON file of SillyTavern or koboldcpp.`)),
    h("div", { class: "fields" },
      ...FIELDS.map(([, label, help], i) => h("label", { class: "field" }, label, inputs[i], h("small", {}, help))),
      h("label", { class: "field" }, "Max tokens", limit, h("small", {}, "limit of each answer, stored in this browser"))),
  ].filter(Boolean), "Save", { wide: true });
  if (!agreed) return null;
  browserStorage.set(MAX_TOKENS, limit.value);
  const sampling = { ...now.sampling };
  FIELDS.forEach(([name], i) => {
    if (inputs[i].value) sampling[name] = Number(inputs[i].value);
    else delete sampling[name];
  });
  const [book] = lorebook.files;
  const isChanged = FIELDS.some(([name]) => sampling[name] !== now.sampling?.[name]);
  return {
    ...(isChanged ? { sampling } : {}),
    // An unchanged system prompt is not sent, because the server would read the whole text again; "" removes it.
    ...(system.value === before ? {} : { system: system.value.trim() }),
    ...(note.value === noteBefore ? {} : { note: note.value.trim() }),
    ...(book ? { lorebook: await parsed(book) } : {}),
  };
}

async function parsed(file) {
  try {
    return JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not a lorebook: choose a JSON file of SillyTavern or koboldcpp`);
  }
}

function numberInput([, , , min, max, step, fallback], value) {
  // A step below 1 would reject values set elsewhere, such as a temperature of 0.777.
  return h("input", { type: "number", min, max, step: step < 1 ? "any" : step, required: fallback !== null,
    placeholder: fallback === null ? "random" : null, value: value ?? fallback ?? "" });
}
