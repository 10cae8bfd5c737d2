// The list of sessions: search, new ones, rename, delete, export, import.

import * as api from "./api.js";
import { announce, ask, askText, askWhether, button, byId, careful, counted, h, save, throttled } from "./dom.js";
import { moveDraft } from "./storage.js";

const SEARCH_MS = 250;

export class Conversations {
  constructor(page) {
    this.page = page;
    this.sessions = [];
    this.search = h("input", { type: "search", "aria-label": "Search chats and stories", placeholder: "Search",
      input: throttled(() => this.refresh(), SEARCH_MS), keydown: ({ key }) => key === "Enter" && this.items.querySelector("a")?.click() });
    this.items = h("ul", { class: "sessions" });
    this.picker = h("input", { type: "file", accept: ".json,application/json", class: "unseen", tabindex: -1,
      "aria-label": "Exported session", change: () => this.takeIn() });
    byId("sessions").replaceChildren(
      h("div", { class: "new" },
        h("a", { class: "button primary", href: "#/new" }, "New chat"),
        h("a", { class: "button", href: "#/new-story" }, "New story")),
      this.search, this.items,
      h("p", { class: "below" }, button("Import", () => this.picker.click(), { class: "small" }), this.picker));
  }

  /** Asks the server what there is; returns what it said. */
  async refresh() {
    const q = this.search.value.trim();
    const sessions = await api.list(q);
    if (q !== this.search.value.trim()) return sessions;
    const before = JSON.stringify(this.sessions);
    this.sessions = sessions;
    if (JSON.stringify(sessions) !== before || this.opened !== this.page.name || this.shownFor !== q) {
      this.show();
      if (q) announce(counted(sessions.length, "result"));
    }
    return sessions;
  }

  show() {
    this.opened = this.page.name;
    const q = this.shownFor = this.search.value.trim();
    const focused = this.items.contains(document.activeElement) && document.activeElement.getAttribute("href");
    this.items.replaceChildren(...this.sessions.map((session) => this.item(session)));
    if (!this.sessions.length) {
      this.items.append(h("li", { class: "quiet" }, q ? "Nothing has these words." : "Nothing saved yet."));
    }
    if (this.sessions.some(isOthers)) {
      this.items.append(h("li", { class: "quiet" }, "Those made with another model or other settings can be read, and go on with a model that reads them again: open one, and choose it."));
    }
    if (focused) [...this.items.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
  }

  item(session) {
    const size = session.kind === "story"
      ? counted(session.tokens, "token") : counted(session.turns, "turn");
    const link = h("a", {
      href: this.page.address(session.name), "aria-current": session.name === this.page.name ? "page" : null,
      class: session.usable ? null : "unusable",
    },
    h("bdi", { class: "name" }, session.name),
    h("bdi", { class: "first" }, session.first || "empty"),
    h("small", {}, `${session.kind === "story" ? "Story" : "Chat"} · ${size} · ${when(session.changed)}`
      + (session.usable ? "" : ` · ${trouble(session)}`)));
    return h("li", {}, link);
  }

  async takeIn() {
    const [file] = this.picker.files;
    this.picker.value = "";
    const session = await careful(async () => api.create(await parsed(file)));
    if (session) this.page.go(session.name);
  }
}

const isOthers = (session) => !session.usable && session.made_with;

/** Why a session does not go on as it is, in a few words. */
function trouble(session) {
  if (!isOthers(session)) return session.why;
  return session.model ? "other settings" : `made with ${session.made_with}`;
}

/** A moment in unix seconds. */
function when(moment) {
  return new Date(moment * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
}

async function parsed(file) {
  try {
    return JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is no export of a session: choose a JSON file that was exported here`);
  }
}

// Behind a question another session may be opened, by going back: each is about the one that was open when it was asked.

/** Renames a session. */
export async function rename(page) {
  const { name: old } = page.session;
  const name = await askText("Rename", "Name", old);
  if (!name || name === old) return;
  const session = await careful(() => api.change(old, { name }));
  if (!session) return;
  moveDraft(old, session.name);
  if (page.viewed === old) page.go(session.name);
}

/** Deletes a session, after asking. */
export async function remove(page) {
  const { name } = page.session;
  const isSure = await askWhether(`Delete ${name}?`, "Its text and its cache are gone then.", "Delete");
  if (isSure && await careful(() => api.remove(name)) && page.viewed === name) page.go(null);
}

/** Lets a session be downloaded, in a form that is asked for. */
export async function exportOne(page) {
  const { name } = page.session;
  const forms = [["text", "Text", "txt"], ["markdown", "Markdown", "md"], ["json", "JSON, to import it again", "json"]];
  const select = h("select", {}, ...forms.map(([value, label]) => h("option", { value }, label)));
  if (!await ask("Export", [h("label", { class: "field" }, "As", select)], "Download")) return;
  const ending = forms.find(([value]) => value === select.value)[2];
  await careful(async () => save(await api.exported(name, select.value), `${name}.${ending}`));
}
