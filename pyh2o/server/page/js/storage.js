// What the browser keeps for the page: choices, and what is written and not yet the server's.

class Kept {
  /** `storage` is a function: asking for it throws where cookies are blocked. */
  constructor(storage) {
    this.storage = storage;
    this.held = new Map(); // what the browser did not take
  }

  get(key) {
    if (this.held.has(key)) return this.held.get(key);
    try {
      return this.storage().getItem(key);
    } catch {
      return null;
    }
  }

  /** Keeps a value; an empty one is forgotten. */
  set(key, value) {
    this.held.delete(key);
    try {
      if (value) this.storage().setItem(key, value);
      else this.storage().removeItem(key);
    } catch {
      if (value) this.held.set(key, value);
    }
  }
}

/** Until the tab is closed. */
export const ofTab = new Kept(() => sessionStorage);

/** For all tabs, and the next time. */
export const ofBrowser = new Kept(() => localStorage);

// What is written and not yet the server's: a reload brings it back, for as long as the tab lives.

const key = (name) => `pyh2o-draft/${name ?? ""}`;

/** What was written for a session, null for a new one. */
export function recall(name) {
  return ofTab.get(key(name)) ?? "";
}

const GAP = "\n\n";

/** Several texts as one. */
export const joined = (...texts) => texts.filter(Boolean).join(GAP);

// The marks of pictures are other ones once these are sent.
const MARK = /<picture:[^<>]*>/g;

/** A text without one that it may begin with; all pictures count as the same. */
export function without(text, first) {
  const [whole, begin] = [text, first ?? ""].map((each) => each.replace(MARK, "<picture>"));
  if (!begin || !whole.startsWith(begin)) return text;
  const rest = whole.slice(begin.length);
  if (rest && !rest.startsWith(GAP)) return text;
  const marks = (text.match(MARK) ?? []).slice((begin.match(/<picture>/g) ?? []).length);
  return rest.slice(GAP.length).replace(/<picture>/g, () => marks.shift());
}

/** Another session has the draft now. */
export function moveDraft(name, other) {
  remember(other, recall(name));
  remember(name, "");
}

/** Keeps what is written; an empty text is forgotten. */
export function remember(name, text) {
  ofTab.set(key(name), text);
}
