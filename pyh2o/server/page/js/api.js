// The server's routes, as functions. All requests of the page go through here, and none to another host.

import { ofTab } from "./storage.js";

// A session as the server tells it: name, kind ("conversation" or "story"), model, changed, bytes, turns, tokens, first,
// usable, why; system, sampling, text or turns_list, whose turns have user, answer, finish, attempt, attempts, start,
// answer_start and end.

const KEY = "pyh2o-key";

/** What the server refused, in its own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let askKey = () => Promise.reject(new ApiError(401, "the server wants its API key"));
let asking = null;

/** Says how a key is asked for; one question serves all requests that wait for it. */
export function onKeyWanted(ask) {
  askKey = ask;
}

/** A response with a good status. */
export async function send(method, path, body, signal) {
  for (;;) {
    const key = ofTab.get(KEY);
    const headers = {};
    if (key) headers["Authorization"] = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const payload = body === undefined ? undefined : JSON.stringify(body);
    const response = await reached(path, { method, headers, body: payload, signal });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(response.status, await complaint(response));
    // Another request may have got the key meanwhile.
    if (ofTab.get(KEY) !== key) continue;
    asking ??= askKey().finally(() => { asking = null; });
    ofTab.set(KEY, await asking);
  }
}

async function reached(path, request) {
  try {
    return await fetch(path, request);
  } catch (error) {
    if (request.signal?.aborted) throw error;
    throw new ApiError(0, "the server does not answer: is it still running?");
  }
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

async function json(method, path, body) {
  return (await send(method, path, body)).json();
}

/** The route of a session. */
export function route(name, rest = "") {
  return `v1/sessions/${encodeURIComponent(name)}${rest}`;
}

const query = (values) => {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given.map(([k, v]) => [k, String(v)]))}` : "";
};

export const machine = () => json("GET", "v1/machine");
export const list = async (q = "") => (await json("GET", `v1/sessions${query({ q })}`)).data;
export const get = (name) => json("GET", route(name));
export const create = (body) => json("POST", "v1/sessions", body);
export const change = (name, body) => json("PATCH", route(name), body);
export const remove = (name) => send("DELETE", route(name));
export const imported = async (text) => (await json("POST", "v1/sessions/import", { text })).data;
export const replace = (name, what) => json("POST", route(name, "/replace"), what);
export const undo = (name) => json("POST", route(name, "/undo"), {});
export const stop = (name) => send("POST", route(name, "/stop"));
export const map = (name, layer, head) => json("GET", route(name, `/map${query({ layer, head })}`));
export const tokens = (name, start, end) =>
  json("GET", route(name, `/tokens${query({ start, end })}`));
export const pin = (name, what) => json("POST", route(name, "/pins"), what);
export const unpin = (name, what) => json("DELETE", route(name, "/pins"), what);
export const recalled = (name) => json("GET", route(name, "/recalled"));
export const exported = async (name, format) =>
  (await send("GET", route(name, `/export${query({ format })}`))).blob();
export const picture = async (name, key) => (await send("GET", route(name, `/pictures/${key}`))).blob();
/** The pages of a PDF file in base64, as their texts are found. */
export const pages = (name, data) => events("v1/files/text", { name, data });

// Server-sent events that answer a POST, which EventSource cannot send.

export const brokenOff = () => new ApiError(0, "the connection broke off: what was said until then is saved");

/** The events of an answer, as far as they come. */
export async function* events(path, body, signal) {
  const response = await send("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for await (const data of lines(reader, signal)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message);
    yield event;
  }
}

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
