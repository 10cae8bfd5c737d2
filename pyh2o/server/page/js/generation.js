// The answer or passage in progress: its events, prefill progress, speed and stop. The page runs one at a time.

import * as api from "./api.js";
import { announce, announceText, formatNumber, formatSpeed, h, showToast } from "./dom.js";

// The server ends a stopped answer at once; if it hangs, the page disconnects.
const STOP_TIMEOUT_MS = 3000;

let current = null; // the session's id and an AbortController

/** The id of the session that is being continued, or null. */
export function generating() {
  return current?.id ?? null;
}

/** Stops the answer in progress; the server keeps its text. */
export function stop() {
  if (!current) return;
  const { id, abort } = current;
  const disconnect = () => abort.abort();
  api.stop(id).catch(disconnect);
  setTimeout(disconnect, STOP_TIMEOUT_MS);
}

/** Generates an answer or a passage. Returns the last event; null after an error, which is shown, or a disconnect. */
export async function generate(id, kind, body, { status, onText, onKv, onReasoning = () => {} }) {
  if (current) return null;
  const abort = new AbortController();
  current = { id, abort };
  document.body.classList.add("generating");
  announce(kind === "answers" ? "Answering" : "Writing");
  try {
    for await (const event of api.events(api.sessionPath(id, `/${kind}`), body, abort.signal)) {
      if (event.type === "reading") showProgress(status, event);
      if (event.type === "kv") {
        if (event.tokens_per_second) showSpeed(status, event.tokens_per_second);
        onKv(event.kv);
      }
      if (event.type === "reasoning") onReasoning(event.text);
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
    throw api.connectionLost();
  } catch (error) {
    if (!abort.signal.aborted) showToast(error);
    return null;
  } finally {
    status.replaceChildren();
    current = null;
    document.body.classList.remove("generating");
  }
}

/** Shows the prefill progress of a long prompt. */
function showProgress(status, { done, of }) {
  const bar = h("progress", { max: of, "aria-label": "Reading", value: done });
  status.replaceChildren(bar, h("span", {}, `Reading ${formatNumber(done)} of ${formatNumber(of)} tokens`));
}

/** Shows the speed; hidden from screen readers, which would read it aloud every second. */
function showSpeed(status, perSecond) {
  status.replaceChildren(h("span", { "aria-hidden": "true" }, formatSpeed(perSecond)));
}
