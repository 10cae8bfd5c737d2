// The panel that lists the keys.

import { ask } from "./dialogs.js";
import { h } from "./dom.js";

const KEYS = [
  ["Enter", "send the message"],
  ["Shift + Enter", "a new line"],
  ["↑ in an empty box", "change the last message"],
  ["Esc", "stop what is written; close a panel"],
  ["Ctrl + K", "search chats and stories"],
  ["Ctrl + Shift + O", "new chat"],
  ["Ctrl + M", "show or hide the memory"],
  ["Ctrl + Enter in a story", "write on, from the cursor or the end"],
  ["← → in a story", "move the cursor by words; click to put it somewhere; Esc takes it away"],
  ["← → in shaded text", "go from token to token"],
  ["?", "this panel"],
];

let isShown = false;

export async function showHelp() {
  if (isShown) return;
  isShown = true;
  const rows = KEYS.map(([key, what]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, what)));
  await ask("Keys", [h("table", { class: "keys" }, h("tbody", {}, ...rows))], "Close", { no: "" });
  isShown = false;
}
