// What is written and not yet the server's: a reload brings it back, for as long as the tab lives.

const key = (name) => `pyh2o-draft/${name ?? ""}`;

/** What was written for a session, null for a new one. */
export function recall(name) {
  return sessionStorage.getItem(key(name)) ?? "";
}

/** Keeps what is written; an empty text is forgotten. */
export function remember(name, text) {
  try {
    if (text) sessionStorage.setItem(key(name), text);
    else sessionStorage.removeItem(key(name));
  } catch {
    // more than a browser keeps: it stays on the page
  }
}
