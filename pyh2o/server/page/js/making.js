// One answer or passage in the making: its events, progress, pieces, stop. The page makes one at a time.

import * as api from "./api.js";
import { announce, announceText, complain, count, h, speed } from "./dom.js";

// A server that was told to stop says so soon; one that is stuck is left.
const STOP_PATIENCE_MS = 3000;

let current = null; // its session's name, and what aborts it

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

/** Makes an answer or a passage; returns the last event, null where it was stopped or went wrong, which was said. */
export async function make(name, kind, body, { status, onText, onKv, onThought = () => {} }) {
  if (current) return null;
  const mine = { name, abort: new AbortController() };
  current = mine;
  document.body.classList.add("making");
  announce(kind === "answers" ? "Answering" : "Writing");
  try {
    for await (const event of api.events(api.route(name, `/${kind}`), body, mine.abort.signal)) {
      if (event.type === "reading") showReading(status, event);
      if (event.type === "kv") {
        if (event.tokens_per_second) showSpeed(status, event.tokens_per_second);
        onKv(event.kv);
      }
      if (event.type === "reasoning") onThought(event.text);
      if (event.type === "text") {
        status.querySelector("progress")?.parentElement.replaceChildren();
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
    throw api.brokenOff();
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
function showReading(status, { done, of }) {
  const bar = h("progress", { max: of, "aria-label": "Reading", value: done });
  status.replaceChildren(bar, h("span", {}, `Reading ${count(done)} of ${count(of)} tokens`));
}

/** How fast it is written; not to screen readers, which would have to say it every second. */
function showSpeed(status, perSecond) {
  status.replaceChildren(h("span", { "aria-hidden": "true" }, speed(perSecond)));
}
