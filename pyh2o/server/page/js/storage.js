// What the browser stores for the page: preferences and drafts.

class SafeStorage {
  /** `storage` is a function, because reading the property throws if cookies are blocked. */
  constructor(storage) {
    this.storage = storage;
    this.unsaved = new Map(); // values that the browser refused
  }

  get(key) {
    if (this.unsaved.has(key)) return this.unsaved.get(key);
    try {
      return this.storage().getItem(key);
    } catch {
      return null;
    }
  }

  /** Stores a value, or removes an empty one. */
  set(key, value) {
    this.unsaved.delete(key);
    try {
      if (value) this.storage().setItem(key, value);
      else this.storage().removeItem(key);
    } catch {
      if (value) this.unsaved.set(key, value);
    }
  }
}

export const tabStorage = new SafeStorage(() => sessionStorage);
export const browserStorage = new SafeStorage(() => localStorage);

// Drafts survive a reload of the page, until the tab is closed.

const textKey = (id) => `pyh2o-draft/${id ?? ""}`;
const picturesKey = (id) => `pyh2o-pictures/${id ?? ""}`;
const MARKER = /<picture:[^<>]*>/g;
const PLACEHOLDER = "<picture:>"; // matches MARKER, so one that the user typed is restored too
const saved = new Map(); // the stored pictures of each draft: writing megabytes at each key press would be slow

/** Splits a text into its picture markers and the text with placeholders. */
const extractMarkers = (text) => [text.match(MARKER) ?? [], text.replace(MARKER, PLACEHOLDER)];
const insertMarkers = (text, markers) => text.replaceAll(PLACEHOLDER, () => markers.shift() ?? "");

/** Returns the draft of a session; a null id is the next new one's. */
export function loadDraft(id) {
  return insertMarkers(tabStorage.get(textKey(id)) ?? "", (tabStorage.get(picturesKey(id)) ?? "").match(MARKER) ?? []);
}

/** Saves a draft, or removes an empty one. */
export function saveDraft(id, text) {
  const [markers, rest] = extractMarkers(text);
  const pictures = markers.join("");
  tabStorage.set(textKey(id), rest);
  if ((saved.get(id) ?? "") !== pictures || !pictures) tabStorage.set(picturesKey(id), pictures);
  saved.set(id, pictures);
}

export function moveDraft(name, newName) {
  saveDraft(newName, loadDraft(name));
  saveDraft(name, "");
}

const GAP = "\n\n";

/** Joins non-empty texts as paragraphs. */
export const joinParts = (...texts) => texts.filter(Boolean).join(GAP);

/** Removes a prefix of whole paragraphs. Pictures count as equal, because sending one changes its marker. */
export function removePrefix(text, prefix) {
  const [[markers, whole], [prefixMarkers, start]] = [text, prefix ?? ""].map(extractMarkers);
  if (!start || !whole.startsWith(start)) return text;
  const rest = whole.slice(start.length);
  if (rest && !rest.startsWith(GAP)) return text;
  return insertMarkers(rest.slice(GAP.length), markers.slice(prefixMarkers.length));
}
