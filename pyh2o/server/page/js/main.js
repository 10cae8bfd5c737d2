// The page: the open session (its id is in the address), its view, and keyboard shortcuts.

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { Conversations, exportOne, remove, rename } from "./conversations.js";
import { ask, askText, button, byId, h, reportErrors, showToast } from "./dom.js";
import { generating, stop } from "./generation.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { askSettings, defaults } from "./settings.js";
import { Story } from "./story.js";

const POLL_MS = 4000;
const NEW = { "#/new": "conversation", "#/new-story": "story" };

class Page {
  constructor() {
    this.id = null; // in the address
    this.shownId = null; // of the session that is shown
    this.newSession = { sampling: defaults() }; // body of the request that creates the next session
    this.models = new Models(this);
    this.conversations = new Conversations(this);
    this.memory = new Memory(this);
  }

  address(id) {
    return `#/s/${id}`;
  }

  /** Opens a session; null for a new chat. */
  go(id) {
    location.hash = id === null ? "#/new" : this.address(id);
  }

  /** Creates the session of a view that was opened without one. */
  async create(view, body) {
    const { system, ...settings } = this.newSession;
    const isChat = body.kind === "conversation"; // a story has no system prompt
    const session = await api.create({ ...settings, ...(isChat && system ? { system } : {}), ...body });
    delete this.newSession.note; // apply to one session only
    delete this.newSession.lorebook;
    if (this.view !== view || this.id !== null) {
      // The user opened something else while the model was loading: keep the view until its session is opened.
      this.background = { id: session.id, view };
      return session;
    }
    this.id = session.id;
    history.replaceState(null, "", this.address(session.id));
    this.setSession(session);
    reportErrors(() => this.conversations.refresh());
    return session;
  }

  /** Opens the session in the address. */
  async open() {
    const { hash } = location;
    if (hash === "#main") return;
    this.showList(false, false);
    if (this.view) closeMenus(); // the list of models can be open before the first view exists
    const id = Number(hash.match(/^#\/s\/(\d+)$/)?.[1]) || null;
    this.id = id;
    const opening = this.opening = Symbol("opening");
    const session = id === null ? null : await reportErrors(() => api.get(id));
    if (this.opening !== opening || this.id !== id) return; // another session was opened in the meantime
    if (id !== null && !session) {
      history.replaceState(null, "", "#/new"); // else going back would lead to the error again
      return this.open();
    }
    this.setView(session?.kind ?? NEW[hash] ?? "conversation", session);
    await reportErrors(() => this.conversations.refresh());
  }

  setView(kind, session) {
    // An answer in progress continues in its view.
    if (this.view && generating() === this.shownId) this.background = { id: this.shownId, view: this.view };
    const isInBackground = session && generating() === session.id && this.background?.id === session.id;
    this.kind = kind;
    this.view = isInBackground ? this.background.view : new (kind === "story" ? Story : Chat)(this);
    byId("main").replaceChildren(this.view.element);
    if (!isInBackground) this.view.show(session);
    this.setSession(session);
    if (!session || matchMedia("(hover: hover)").matches) this.view.focus();
  }

  /** Updates everything except the view of the text. */
  setSession(session) {
    this.session = session;
    this.shownId = session?.id ?? null;
    const title = session?.name ?? (this.kind === "story" ? "New story" : "New chat");
    document.title = `${title} · pyh2o`;
    byId("title").textContent = title;
    this.showActions();
    this.conversations.show();
    this.memory.open(session);
  }

  showActions() {
    const { session } = this;
    this.models.show();
    if (Boolean(session) === this.hasActions) return; // replacing them would close the menu and lose the focus
    this.hasActions = Boolean(session);
    const summary = h("summary", { "aria-label": "More" }, "⋯");
    // A closed dialog returns the focus, so it must be on a visible element before.
    const item = (label, work) => button(label, () => { menu.open = false; summary.focus(); work(); });
    const more = session
      ? [item("Rename", () => rename(this)), item("Export", () => exportOne(this)),
         item("Delete", () => remove(this))] : [];
    const menu = h("details", { class: "menu" }, summary,
      h("div", { class: "menu-items" }, item("Settings", () => this.settings()), ...more, item("Keyboard shortcuts", showShortcuts)));
    byId("actions").replaceChildren(this.memory.toggle, menu);
  }

  async settings() {
    const { session } = this;
    const changed = await reportErrors(() => askSettings(session ?? this.newSession, this.kind === "story"));
    if (!changed || !Object.keys(changed).length) return;
    if (!session) Object.assign(this.newSession, changed);
    else if (await reportErrors(() => api.change(session.id, changed))) await this.reload(session.id);
  }

  /** Fetches a session and shows it if it is open; null after an error. */
  async reload(id) {
    const session = await reportErrors(() => api.get(id));
    if (session) await this.refresh(session);
    return session;
  }

  /** Shows the new state of a session if it is open, except during an answer: its end reloads the session. */
  async refresh(session) {
    if (this.shownId !== session.id || generating() === session.id) return;
    this.view.show(session);
    this.setSession(session);
    await reportErrors(() => this.conversations.refresh());
  }

  /** Returns whether the server's session is the one shown; else shows the new state, so that no unseen text is changed. */
  async isCurrent({ id, name, text, turns_list: turns }) {
    const now = await reportErrors(() => api.get(id));
    if (!now) return false;
    if (now.text === text && JSON.stringify(now.turns_list) === JSON.stringify(turns)) return true;
    await this.refresh(now);
    showToast(`${name} was changed by another tab or program. This is its current state; your action was cancelled.`);
    return false;
  }

  /** Shows changes by other tabs and programs while the page is visible. */
  async poll() {
    if (!document.hidden && !this.isLockedOut) {
      const isShown = ({ id }) => id === this.shownId;
      let sessions = await this.conversations.refresh().catch(() => []);
      // The search may exclude the open session.
      if (this.shownId && !sessions.some(isShown)) sessions = await api.list().catch(() => []);
      const current = sessions.find(isShown);
      const isChanged = current && this.session && current.changed !== this.session.changed;
      if (isChanged && generating() !== current.id) {
        await this.reload(current.id);
        this.memory.afterAnswer(current.id);
      }
    }
    setTimeout(() => this.poll(), POLL_MS);
  }

  async askKey() {
    const key = await askText("The server requires its API key", "API key (stored until this tab is closed)", "", "password");
    if (key && /[^\x00-\xff]/.test(key)) {
      showToast("This key contains a character that cannot be sent, such as a curly quote: enter the key as it is set on the server.");
      return this.askKey();
    }
    if (key) return key;
    this.isLockedOut = true;
    throw new api.ApiError(401, "The server requires its API key: reload the page to enter it.");
  }

  onKey(event) {
    if (document.querySelector("dialog[open]")) return;
    const { key, ctrlKey, metaKey, shiftKey, target } = event;
    const isControl = ctrlKey || metaKey;
    const handle = (work) => { event.preventDefault(); work(); };
    if (key === "Escape" && closeMenus()) handle(() => {});
    else if (key === "Escape" && byId("sessions").classList.contains("open")) handle(() => this.showList(false));
    else if (key === "Escape" && generating()) handle(stop);
    else if (isControl && key.toLowerCase() === "k") handle(() => this.showList(true));
    else if (isControl && shiftKey && key.toLowerCase() === "o") handle(() => this.go(null));
    else if (isControl && key.toLowerCase() === "m") handle(() => this.memory.show(!this.memory.isShown));
    else if (key === "?" && !/^(TEXTAREA|INPUT)$/.test(target.tagName)) handle(showShortcuts);
  }

  showList(isOpen, isFocused = true) {
    byId("sessions").classList.toggle("open", isOpen);
    byId("menu").setAttribute("aria-expanded", String(isOpen));
    if (isFocused) (isOpen ? this.conversations.search : byId("menu")).focus();
  }

  async start() {
    api.onKeyRequired(() => this.askKey());
    addEventListener("keydown", (event) => this.onKey(event));
    // The link to the open session does not change the address, but should close the list too.
    byId("sessions").addEventListener("click", ({ target }) => target.closest("a") && this.showList(false, false));
    byId("menu").addEventListener("click", () => this.showList(!byId("sessions").classList.contains("open")));
    addEventListener("click", ({ target }) => closeMenus((menu) => !menu.contains(target)));
    byId("model").replaceWith(this.models.element);
    this.newSession.model = await this.models.first();
    addEventListener("hashchange", () => this.open()); // registered late: else the first view could be opened twice
    await this.open();
    setTimeout(() => this.poll(), POLL_MS);
  }
}

addEventListener("unhandledrejection", (event) => showToast(event.reason));
new Page().start();

/** Closes the open menus that match, and returns whether there was one. The focus returns to its button. */
function closeMenus(matches = () => true) {
  const open = [...document.querySelectorAll(".menu[open]")].filter(matches);
  for (const menu of open) {
    if (menu.contains(document.activeElement)) menu.firstChild.focus();
    menu.open = false;
  }
  return open.length > 0;
}

const SHORTCUTS = [
  ["Enter", "send the message"],
  ["Shift + Enter", "start a new line"],
  ["↑ in an empty box", "edit the last message"],
  ["Esc", "stop the answer; close a panel"],
  ["Ctrl + K", "search chats and stories"],
  ["Ctrl + Shift + O", "new chat"],
  ["Ctrl + M", "show or hide the memory"],
  ["Ctrl + Enter in a story", "continue from the cursor or the end"],
  ["← → in a story", "move the cursor by a word (a click sets it, Esc removes it)"],
  ["← → in shaded text", "go to the previous or next token"],
  ["P in shaded text", "pin or unpin the token"],
  ["?", "show the keyboard shortcuts"],
];

async function showShortcuts() {
  const rows = SHORTCUTS.map(([key, effect]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, effect)));
  await ask("Keyboard shortcuts", [h("table", { class: "shortcuts" }, h("tbody", {}, ...rows))], "Close", { no: "" });
}
