// Functions for the server's routes. All requests of the page are sent here, and none to another host.

import { tabStorage } from "./storage.js";

// docs/sessions-api.md describes the fields of sessions, turns and events.

const KEY = "pyh2o-key";

/** An error response of the server, with its message. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let askKey = () => Promise.reject(new ApiError(401, "the server requires its API key"));
let asking = null;

/** Sets the function that asks the user for the API key. Concurrent requests share one question. */
export function onKeyRequired(ask) {
  askKey = ask;
}

/** Sends a request and returns the response if its status is good. */
export async function request(method, path, body, signal) {
  for (;;) {
    const key = tabStorage.get(KEY);
    const headers = {};
    if (key) headers["Authorization"] = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const payload = body === undefined ? undefined : JSON.stringify(body);
    const response = await fetchResponse(path, { method, headers, body: payload, signal });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(response.status, await errorMessage(response));
    // Another request may have set the key in the meantime.
    if (tabStorage.get(KEY) !== key) continue;
    asking ??= askKey().finally(() => { asking = null; });
    tabStorage.set(KEY, await asking);
  }
}

async function fetchResponse(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, "the server does not respond: check that it is running");
  }
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server responded with status ${response.status}`;
  }
}

async function json(method, path, body) {
  return (await request(method, path, body)).json();
}

/** The path of a session's route. */
export function sessionPath(id, rest = "") {
  return `v1/sessions/${id}${rest}`;
}

const query = (values) => {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given.map(([k, v]) => [k, String(v)]))}` : "";
};

export const machine = () => json("GET", "v1/machine");
export const list = async (q = "") => (await json("GET", `v1/sessions${query({ q })}`)).data;
export const get = (id) => json("GET", sessionPath(id));
export const create = (body) => json("POST", "v1/sessions", body);
export const change = (id, body) => json("PATCH", sessionPath(id), body);
export const remove = (id) => request("DELETE", sessionPath(id));
export const readImport = async (text) => (await json("POST", "v1/sessions/import", { text })).data;
export const replace = (id, change) => json("POST", sessionPath(id, "/replace"), change);
export const undo = (id) => json("POST", sessionPath(id, "/undo"), {});
export const stop = (id) => request("POST", sessionPath(id, "/stop"));
export const map = (id, layer, head) => json("GET", sessionPath(id, `/map${query({ layer, head })}`));
export const tokens = (id, start, end) =>
  json("GET", sessionPath(id, `/tokens${query({ start, end })}`));
export const pin = (id, target) => json("POST", sessionPath(id, "/pins"), target);
export const unpin = (id, target) => json("DELETE", sessionPath(id, "/pins"), target);
export const recalled = (id) => json("GET", sessionPath(id, "/recalled"));
export const exportSession = async (id, format) =>
  (await request("GET", sessionPath(id, `/export${query({ format })}`))).blob();
export const picture = async (id, hash) => (await request("GET", sessionPath(id, `/pictures/${hash}`))).blob();
/** Streams the texts of the pages of a PDF file, given in base64. */
export const readPDF = (name, data) => events("v1/files/text", { name, data });

// Server-sent events in response to a POST, which EventSource cannot send.

export const connectionLost = () => new ApiError(0, "the connection was lost: the text up to then is saved");

/** Yields the events of a response. */
export async function* events(path, body, signal) {
  const response = await request("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for await (const data of dataLines(reader, signal)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message);
    yield event;
  }
}

/** Yields the payload of each `data:` line; comments only keep the connection open. */
async function* dataLines(reader, signal) {
  const parts = [];
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw signal.aborted ? error : connectionLost(); });
    if (done) return;
    // Join only at the end of a line: joining at each read would copy a long line repeatedly.
    if (!value.includes("\n")) {
      parts.push(value);
      continue;
    }
    const lines = (parts.join("") + value).split("\n");
    parts.length = 0;
    parts.push(lines.pop());
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
