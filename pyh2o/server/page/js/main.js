// The page: which session is open (the address says it), which view shows it, and the keys that work everywhere.

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { Conversations, exportOne, remove, rename } from "./conversations.js";
import { ask, askText, button, byId, careful, complain, h } from "./dom.js";
import { stop, writing } from "./making.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { askSettings, defaults } from "./settings.js";
import { Story } from "./story.js";

const POLL_MS = 4000;
const NEW = { "#/new": "conversation", "#/new-story": "story" };

class Page {
  constructor() {
    this.name = null;
    this.draft = { sampling: defaults() };
    this.models = new Models(this);
    this.conversations = new Conversations(this);
    this.memory = new Memory(this);
  }

  address(name) {
    return `#/s/${encodeURIComponent(name)}`;
  }

  /** Opens a session; null for a new chat. */
  go(name) {
    location.hash = name === null ? "#/new" : this.address(name);
  }

  /** Makes the session of a view that was shown for a new one. */
  async create(view, body) {
    const { system, ...draft } = this.draft;
    const isChat = body.kind === "conversation"; // a story has no system prompt
    const session = await api.create({ ...draft, ...(isChat && system ? { system } : {}), ...body });
    delete this.draft.note; // what a text is told is for that alone
    delete this.draft.lorebook;
    if (this.view !== view || this.name !== null) {
      // Loading a model takes time, and something else is open by now: the view is shown when this one is opened.
      this.kept = { name: session.name, view };
      return session;
    }
    this.name = session.name;
    history.replaceState(null, "", this.address(session.name));
    this.setSession(session);
    careful(() => this.conversations.refresh());
    return session;
  }

  /** Shows what the address says. */
  async open() {
    const { hash } = location;
    if (hash === "#main") return;
    this.showList(false, false);
    if (this.view) closeMenus(); // the list of models can be opened before the first view is there
    // as a query: one that was written by hand may have a percent sign of its own
    const name = hash.startsWith("#/s/") ? new URLSearchParams(`name=${hash.slice(4)}`).get("name") : null;
    this.name = name;
    const mine = this.opening = Symbol("a way here");
    const session = name === null ? null : await careful(() => api.get(name));
    if (this.opening !== mine || this.name !== name) return; // somebody was faster
    if (name !== null && !session) {
      history.replaceState(null, "", "#/new"); // else the way back would end here
      return this.open();
    }
    this.setView(session?.kind ?? NEW[hash] ?? "conversation", session);
    await careful(() => this.conversations.refresh());
  }

  setView(kind, session) {
    // What is being written goes on in the view that it began in.
    if (this.view && writing() === this.viewed) this.kept = { name: this.viewed, view: this.view };
    const isKept = session && writing() === session.name && this.kept?.name === session.name;
    this.kind = kind;
    this.view = isKept ? this.kept.view : new (kind === "story" ? Story : Chat)(this);
    byId("main").replaceChildren(this.view.element);
    if (!isKept) this.view.show(session);
    this.setSession(session);
    if (!session || matchMedia("(hover: hover)").matches) this.view.focus();
  }

  /** What the page says of a session: not its text. */
  setSession(session) {
    this.session = session;
    this.viewed = session?.name ?? null;
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
    if (Boolean(session) === this.hasActions) return; // an answer that ends closes no menu, and takes nobody's focus
    this.hasActions = Boolean(session);
    const summary = h("summary", { "aria-label": "More" }, "⋯");
    // A dialog gives the focus back to where it was: that has to be in sight then.
    const item = (label, work) => button(label, () => { menu.open = false; summary.focus(); work(); });
    const more = session
      ? [item("Rename", () => rename(this)), item("Export", () => exportOne(this)),
         item("Delete", () => remove(this))] : [];
    const menu = h("details", { class: "menu" }, summary,
      h("div", { class: "menu-items" }, item("Settings", () => this.settings()), ...more, item("Keys", showHelp)));
    byId("actions").replaceChildren(this.memory.toggle, menu);
  }

  async settings() {
    const { session } = this;
    const changed = await careful(() => askSettings(session ?? this.draft, this.kind === "story"));
    if (!changed || !Object.keys(changed).length) return;
    if (!session) Object.assign(this.draft, changed);
    else if (await careful(() => api.change(session.name, changed))) await this.reload(session.name);
  }

  /** Shows a session as the server has it now; null if it does not say. */
  async reload(name) {
    const session = await careful(() => api.get(name));
    if (session) await this.renew(session);
    return session;
  }

  /** Shows what the server has of a session, if it is open; what is written to it is shown when that has ended. */
  async renew(session) {
    if (this.viewed !== session.name || writing() === session.name) return;
    this.view.show(session);
    this.setSession(session);
    await careful(() => this.conversations.refresh());
  }

  /** Whether the server has a session as it is shown; else it is shown anew: nobody changes an end that he has not seen. */
  async isCurrent({ name, text, turns_list: turns }) {
    const now = await careful(() => api.get(name));
    if (!now) return false;
    if (now.text === text && JSON.stringify(now.turns_list) === JSON.stringify(turns)) return true;
    await this.renew(now);
    complain(`${name} was changed elsewhere: this is how it is now, and nothing was done to it.`);
    return false;
  }

  /** Sees what other tabs and programs have done, while somebody looks. */
  async poll() {
    if (!document.hidden && !this.isShutOut) {
      const isCurrent = ({ name }) => name === this.viewed;
      let sessions = await this.conversations.refresh().catch(() => []);
      // A search may leave out the one that is open.
      if (this.viewed && !sessions.some(isCurrent)) sessions = await api.list().catch(() => []);
      const current = sessions.find(isCurrent);
      const isOther = current && this.session && current.changed !== this.session.changed;
      if (isOther && writing() !== current.name) {
        await this.reload(current.name);
        this.memory.afterAnswer(current.name);
      }
    }
    setTimeout(() => this.poll(), POLL_MS);
  }

  async askKey() {
    const key = await askText("The server wants its API key", "API key (kept until this tab is closed)", "", "password");
    if (key && /[^\x00-\xff]/.test(key)) {
      complain("This key has a sign that cannot be sent, such as a curved quote: give it as the server has it.");
      return this.askKey();
    }
    if (key) return key;
    this.isShutOut = true;
    throw new api.ApiError(401, "Without the API key there is nothing to see: reload the page to give it.");
  }

  onKey(event) {
    if (document.querySelector("dialog[open]")) return;
    const { key, ctrlKey, metaKey, shiftKey, target } = event;
    const isControl = ctrlKey || metaKey;
    const does = (work) => { event.preventDefault(); work(); };
    if (key === "Escape" && closeMenus()) does(() => {});
    else if (key === "Escape" && byId("sessions").classList.contains("open")) does(() => this.showList(false));
    else if (key === "Escape" && writing()) does(stop);
    else if (isControl && key.toLowerCase() === "k") does(() => this.showList(true));
    else if (isControl && shiftKey && key.toLowerCase() === "o") does(() => this.go(null));
    else if (isControl && key.toLowerCase() === "m") does(() => this.memory.show(!this.memory.isShown));
    else if (key === "?" && !/^(TEXTAREA|INPUT)$/.test(target.tagName)) does(showHelp);
  }

  showList(isOpen, isFocused = true) {
    byId("sessions").classList.toggle("open", isOpen);
    byId("menu").setAttribute("aria-expanded", String(isOpen));
    if (isFocused) (isOpen ? this.conversations.search : byId("menu")).focus();
  }

  async start() {
    api.onKeyWanted(() => this.askKey());
    addEventListener("keydown", (event) => this.onKey(event));
    // Also where the link is to what is open already, and the address stays as it is.
    byId("sessions").addEventListener("click", ({ target }) => target.closest("a") && this.showList(false, false));
    byId("menu").addEventListener("click", () => this.showList(!byId("sessions").classList.contains("open")));
    addEventListener("click", ({ target }) => closeMenus((menu) => !menu.contains(target)));
    byId("model").replaceWith(this.models.element);
    this.draft.model = await this.models.first();
    addEventListener("hashchange", () => this.open()); // before, the first view would be opened twice
    await this.open();
    setTimeout(() => this.poll(), POLL_MS);
  }
}

addEventListener("unhandledrejection", (event) => complain(event.reason));
new Page().start();

/** Closes the open menus that are meant, and gives the focus back; whether there was one. */
function closeMenus(isMeant = () => true) {
  const open = [...document.querySelectorAll(".menu[open]")].filter(isMeant);
  for (const menu of open) {
    if (menu.contains(document.activeElement)) menu.firstChild.focus();
    menu.open = false;
  }
  return open.length > 0;
}

// The panel that lists the keys.

const KEYS = [
  ["Enter", "send the message"],
  ["Shift + Enter", "a new line"],
  ["↑ in an empty box", "change the last message"],
  ["Esc", "stop what is written; close a panel"],
  ["Ctrl + K", "search chats and stories"],
  ["Ctrl + Shift + O", "new chat"],
  ["Ctrl + M", "show or hide the memory"],
  ["Ctrl + Enter in a story", "write on, from the cursor or the end"],
  ["← → in a story", "move the cursor by words; click to put it somewhere; Esc takes it away"],
  ["← → in shaded text", "go from token to token"],
  ["?", "this panel"],
];

async function showHelp() {
  const rows = KEYS.map(([key, what]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, what)));
  await ask("Keys", [h("table", { class: "keys" }, h("tbody", {}, ...rows))], "Close", { no: "" });
}
