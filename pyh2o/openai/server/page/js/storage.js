// What the browser keeps for the page. Where it keeps nothing, or no more, the page remembers it until it is closed.

class Kept {
  /** @param {() => Storage} storage asking for it throws where cookies are blocked */
  constructor(storage) {
    this.storage = storage;
    /** @type {Map<string, string>} what the browser did not take */
    this.held = new Map();
  }

  /** @returns {string|null} */
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
