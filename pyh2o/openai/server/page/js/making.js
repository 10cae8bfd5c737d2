// One answer or passage in the making: progress, pieces, stop. The page makes one at a time.

import * as api from "./api.js";
import { h } from "./dom.js";
import { count, seconds, speed } from "./format.js";
import { announce, announceText, complain } from "./live.js";
import { events } from "./stream.js";

// A server that was told to stop says so soon; one that is stuck is left.
const STOP_PATIENCE_MS = 3000;

/** @type {{name: string, abort: AbortController}|null} */
let current = null;

/** The session that is written now, if any. */
export function writing() {
  return current?.name ?? null;
}

/** Stops what is made; the server keeps what was said. */
export function stop() {
  if (!current) return;
  const { name, abort } = current;
  const leave = () => abort.abort();
  api.stop(name).catch(leave);
  setTimeout(leave, STOP_PATIENCE_MS);
}

/**
 * Makes an answer or a passage.
 * @param {string} name
 * @param {"answers"|"passages"} kind
 * @param {object} body
 * @param {{status: HTMLElement, onText: (text: string) => void, onKv: (kv: any) => void}} to
 * @returns {Promise<any>} the last event; null where it was stopped or went wrong, which was said
 */
export async function make(name, kind, body, { status, onText, onKv }) {
  if (current) return null;
  const mine = { name, abort: new AbortController() };
  current = mine;
  document.body.classList.add("making");
  announce(kind === "answers" ? "Answering" : "Writing");
  try {
    for await (const event of events(name, kind, body, mine.abort.signal)) {
      if (event.type === "reading") showReading(status, event);
      if (event.type === "kv") onKv(event.kv);
      if (event.type === "text") {
        status.replaceChildren();
        onText(event.text);
        announceText(event.text);
      }
      if (event.type === "done") {
        onKv({ ...event.kv, first_token_seconds: event.first_token_seconds,
               tokens_per_second: event.tokens_per_second });
        announceText("", true);
        return event;
      }
    }
    return null;
  } catch (error) {
    if (!mine.abort.signal.aborted) complain(error);
    return null;
  } finally {
    status.replaceChildren();
    current = null;
    document.body.classList.remove("making");
  }
}

/** How far a long prompt has been read. */
function showReading(status, { done, of, per_second, seconds_left }) {
  const words = [`Reading ${count(done)} of ${count(of)} tokens`];
  if (per_second) words.push(speed(per_second));
  if (seconds_left !== null && seconds_left !== undefined) words.push(`${seconds(seconds_left)} left`);
  const bar = h("progress", { max: of, "aria-label": "Reading", value: done });
  status.replaceChildren(bar, h("span", {}, words.join(" · ")));
}
