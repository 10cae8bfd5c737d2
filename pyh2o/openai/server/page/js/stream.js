// Server-sent events of an answer in the making, read from a POST, which EventSource cannot send.

import { ApiError, route, send } from "./api.js";

/**
 * The events of an answer or a passage, until it is done.
 * @param {string} name of the session
 * @param {"answers"|"passages"} kind
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* events(name, kind, body, signal) {
  const response = await send("POST", route(name, `/${kind}`), body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let isDone = false;
  for await (const data of lines(reader, signal)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message);
    isDone ||= event.type === "done";
    yield event;
  }
  if (!isDone) throw brokenOff();
}

const brokenOff = () => new ApiError(0, "the connection broke off: what was said until then is saved");

/** What stands behind `data:` in each line; comments keep the connection open and say nothing. */
async function* lines(reader, signal) {
  const pieces = [];
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw signal.aborted ? error : brokenOff(); });
    if (done) return;
    // Joined only when a line ends: a huge one in many pieces would be copied again and again.
    if (!value.includes("\n")) {
      pieces.push(value);
      continue;
    }
    const whole = (pieces.join("") + value).split("\n");
    pieces.length = 0;
    pieces.push(whole.pop());
    for (const line of whole) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
