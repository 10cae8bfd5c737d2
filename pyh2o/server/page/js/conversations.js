// The list of sessions: search, create, rename, delete, export, import.

import * as api from "./api.js";
import { announce, ask, askText, askToConfirm, button, byId, download, formatNumber, h, plural, reportErrors, showToast, throttled } from "./dom.js";
import { generating } from "./generation.js";
import { saveDraft } from "./storage.js";

const SEARCH_MS = 250;
const COMPARED_LETTERS = 12; // of the name and the first words

export class Conversations {
  constructor(page) {
    this.page = page;
    this.sessions = [];
    this.search = h("input", { type: "search", "aria-label": "Search chats and stories", placeholder: "Search",
      input: throttled(() => this.refresh(), SEARCH_MS), keydown: ({ key }) => key === "Enter" && this.items.querySelector("a")?.click() });
    this.items = h("ul", { class: "sessions" });
    this.picker = h("input", { type: "file", accept: ".json,.jsonl,application/json", class: "visually-hidden", tabindex: -1,
      "aria-label": "Exported chats", change: () => this.importFile() });
    this.importStatus = h("span", { class: "muted", role: "status" });
    byId("sessions").replaceChildren(
      h("div", { class: "new-session" },
        h("a", { class: "button primary", href: "#/new" }, "New chat"),
        h("a", { class: "button", href: "#/new-story" }, "New story")),
      this.search, this.items,
      h("p", { class: "import" }, button("Import", () => this.picker.click(), { class: "small",
        title: "Chats exported by pyh2o, SillyTavern (.jsonl) or ChatGPT (conversations.json)" }), this.importStatus, this.picker));
  }

  /** Fetches and shows the list; returns it. */
  async refresh() {
    const q = this.search.value.trim();
    const sessions = await api.list(q);
    if (q !== this.search.value.trim()) return sessions;
    const before = JSON.stringify(this.sessions);
    this.sessions = sessions;
    if (JSON.stringify(sessions) !== before || this.shownId !== this.page.id || this.shownQuery !== q) {
      this.show();
      if (q) announce(plural(sessions.length, "result"));
    }
    return sessions;
  }

  show() {
    this.shownId = this.page.id;
    const q = this.shownQuery = this.search.value.trim();
    const focused = this.items.contains(document.activeElement) && document.activeElement.getAttribute("href");
    this.items.replaceChildren(...this.sessions.map((session) => this.item(session)));
    if (!this.sessions.length) {
      this.items.append(h("li", { class: "muted" }, q ? "No chats or stories found." : "No saved chats or stories yet."));
    }
    if (this.sessions.some(({ usable }) => !usable)) {
      this.items.append(h("li", { class: "muted" }, "To continue a text that was made with another model, open it and choose a model. The model reads the whole text again."));
    }
    if (focused) [...this.items.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
  }

  item(session) {
    const size = session.kind === "story" ? plural(session.tokens, "token")
      : session.turns ? plural(session.turns, "turn") : generating() === session.id ? "answering" : "empty";
    // Hide the first words if they are the name.
    const isNamedAfter = letters(session.first).startsWith(letters(session.name).slice(0, COMPARED_LETTERS));
    const words = session.snippet ?? (isNamedAfter ? "" : session.first);
    const link = h("a", {
      href: this.page.address(session.id), "aria-current": session.id === this.page.id ? "page" : null,
      class: session.usable ? null : "unusable",
    },
    h("bdi", { class: "name" }, session.name),
    words && words !== session.name && h("bdi", { class: "first-words" }, ...marked(words, this.shownQuery)),
    h("small", {}, `${session.kind === "story" ? "Story" : "Chat"} · ${size} · ${formatTime(session.changed)}`
      + (session.usable ? "" : ` · made with ${session.made_with}`)));
    return h("li", {}, link);
  }

  /** Creates a session for each chat in the chosen file. */
  async importFile() {
    const [file] = this.picker.files;
    this.picker.value = "";
    const bodies = await reportErrors(async () => bodiesOf(await file.text())) ?? [];
    const created = [];
    for (const [n, { unanswered = "", ...body }] of bodies.entries()) {
      this.importStatus.textContent = bodies.length > 1 ? `${formatNumber(n + 1)} of ${formatNumber(bodies.length)}` : "";
      const session = await reportErrors(() => api.create({ model: this.page.newSession.model, ...body }));
      if (!session) continue;
      saveDraft(session.id, unanswered);
      created.push(session.id);
    }
    this.importStatus.textContent = "";
    if (created.length === 1) return this.page.go(created[0]);
    if (bodies.length > 1) showToast(`${formatNumber(created.length)} of ${plural(bodies.length, "chat")} imported.`);
    await reportErrors(() => this.refresh());
  }
}

/** Request bodies for new sessions: an export of pyh2o is one itself, and the server converts other formats. */
async function bodiesOf(text) {
  let own = null;
  try { own = JSON.parse(text); } catch { /* may be JSON lines */ }
  return own?.format === "pyh2o export" ? [own] : api.readImport(text);
}

const letters = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");

/** The parts of a snippet, with the searched words marked. */
function marked(snippet, query) {
  if (!query) return [snippet];
  const words = query.split(/\s+/).map((word) => word.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
  return snippet.split(new RegExp(`(${words.join("|")})`, "iu")).map((part, n) => (n % 2 ? h("mark", {}, part) : part));
}

/** Formats unix seconds: the time if it is today, else the date. */
function formatTime(seconds) {
  const then = new Date(seconds * 1000);
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday ? then.toLocaleTimeString([], { timeStyle: "short" }) : then.toLocaleDateString([], { dateStyle: "medium" });
}

// While a dialog is open, going back can open another session: these functions act on the one for which the dialog was opened.

export async function rename(page) {
  const { id, name: old } = page.session;
  const name = await askText("Rename", "Name", old);
  if (!name || name === old) return;
  const session = await reportErrors(() => api.change(id, { name }));
  if (session) await page.refresh(session);
}

export async function remove(page) {
  const { id, name } = page.session;
  const isSure = await askToConfirm(`Delete ${name}?`, "Its text and its cache are deleted permanently.", "Delete");
  if (isSure && await reportErrors(() => api.remove(id)) && page.shownId === id) page.go(null);
}

/** Downloads a session in a format that the user chooses. */
export async function exportOne(page) {
  const { id, name } = page.session;
  const formats = [["text", "Text", "txt"], ["markdown", "Markdown", "md"], ["json", "JSON (can be imported)", "json"]];
  const select = h("select", {}, ...formats.map(([value, label]) => h("option", { value }, label)));
  if (!await ask("Export", [h("label", { class: "field" }, "Format", select)], "Download")) return;
  const extension = formats.find(([value]) => value === select.value)[2];
  await reportErrors(async () => download(await api.exportSession(id, select.value), `${name}.${extension}`));
}
