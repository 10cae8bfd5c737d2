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
const keyOfPictures = (name) => `pyh2o-pictures/${name ?? ""}`;
const MARK = /<picture:[^<>]*>/g;
const BLANK = "<picture:>"; // which is a mark, too: what people type stays
const kept = new Map(); // the pictures of each draft: to write megabytes takes a browser longer than a key

/** The marks of a text's pictures, and the text with blanks in their places. */
const apart = (text) => [text.match(MARK) ?? [], text.replace(MARK, BLANK)];
const filled = (text, marks) => text.replaceAll(BLANK, () => marks.shift() ?? "");

/** What was written for a session, null for a new one. */
export function recall(name) {
  return filled(ofTab.get(key(name)) ?? "", (ofTab.get(keyOfPictures(name)) ?? "").match(MARK) ?? []);
}

/** Keeps what is written; an empty text is forgotten. */
export function remember(name, text) {
  const [marks, rest] = apart(text);
  const pictures = marks.join("");
  ofTab.set(key(name), rest);
  if ((kept.get(name) ?? "") !== pictures || !pictures) ofTab.set(keyOfPictures(name), pictures);
  kept.set(name, pictures);
}

/** Another session has the draft now. */
export function moveDraft(name, other) {
  remember(other, recall(name));
  remember(name, "");
}

const GAP = "\n\n";

/** Several texts as one. */
export const joined = (...texts) => texts.filter(Boolean).join(GAP);

/** A text without one that it may begin with; all pictures count as the same, as their marks are others once they are sent. */
export function without(text, first) {
  const [[marks, whole], [before, begin]] = [text, first ?? ""].map(apart);
  if (!begin || !whole.startsWith(begin)) return text;
  const rest = whole.slice(begin.length);
  if (rest && !rest.startsWith(GAP)) return text;
  return filled(rest.slice(GAP.length), marks.slice(before.length));
}
