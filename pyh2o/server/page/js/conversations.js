// The list of sessions: search, new ones, rename, delete, export, import.

import * as api from "./api.js";
import { announce, ask, askText, askWhether, button, byId, careful, complain, count, counted, h, save, throttled } from "./dom.js";
import { writing } from "./making.js";
import { moveDraft, remember } from "./storage.js";

const SEARCH_MS = 250;
const ALIKE = 12; // letters of a name and of first words that tell whether they are the same

export class Conversations {
  constructor(page) {
    this.page = page;
    this.sessions = [];
    this.search = h("input", { type: "search", "aria-label": "Search chats and stories", placeholder: "Search",
      input: throttled(() => this.refresh(), SEARCH_MS), keydown: ({ key }) => key === "Enter" && this.items.querySelector("a")?.click() });
    this.items = h("ul", { class: "sessions" });
    this.picker = h("input", { type: "file", accept: ".json,.jsonl,application/json", class: "unseen", tabindex: -1,
      "aria-label": "Exported chats", change: () => this.takeIn() });
    this.taking = h("span", { class: "quiet", role: "status" });
    byId("sessions").replaceChildren(
      h("div", { class: "new" },
        h("a", { class: "button primary", href: "#/new" }, "New chat"),
        h("a", { class: "button", href: "#/new-story" }, "New story")),
      this.search, this.items,
      h("p", { class: "below" }, button("Import", () => this.picker.click(), { class: "small",
        title: "Chats exported here, by SillyTavern (.jsonl) or by ChatGPT (conversations.json)" }), this.taking, this.picker));
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
    const size = session.kind === "story" ? counted(session.tokens, "token")
      : session.turns ? counted(session.turns, "turn") : writing() === session.name ? "answering" : "nothing said yet";
    // A chat that was named after its first words does not say them twice.
    const isSaid = letters(session.first).startsWith(letters(session.name).slice(0, ALIKE));
    const link = h("a", {
      href: this.page.address(session.name), "aria-current": session.name === this.page.name ? "page" : null,
      class: session.usable ? null : "unusable",
    },
    h("bdi", { class: "name" }, session.name),
    isSaid || !session.first ? "" : h("bdi", { class: "first" }, session.first),
    h("small", {}, `${session.kind === "story" ? "Story" : "Chat"} · ${size} · ${when(session.changed)}`
      + (session.usable ? "" : ` · ${trouble(session)}`)));
    return h("li", {}, link);
  }

  /** Begins a session with each chat of a file. */
  async takeIn() {
    const [file] = this.picker.files;
    this.picker.value = "";
    const bodies = await careful(async () => bodiesOf(await file.text())) ?? [];
    const made = [];
    for (const [n, { unanswered = "", ...body }] of bodies.entries()) {
      this.taking.textContent = bodies.length > 1 ? `${count(n + 1)} of ${count(bodies.length)}` : "";
      const session = await careful(() => api.create({ model: this.page.draft.model, ...body }));
      if (!session) continue;
      remember(session.name, unanswered);
      made.push(session.name);
    }
    this.taking.textContent = "";
    if (made.length === 1) return this.page.go(made[0]);
    if (bodies.length > 1) complain(`${count(made.length)} of ${counted(bodies.length, "chat")} were imported.`);
    await careful(() => this.refresh());
  }
}

/** What to begin sessions with: an export of our own, or what the server makes of another one. */
async function bodiesOf(text) {
  let own = null;
  try { own = JSON.parse(text); } catch { /* lines of JSON, perhaps */ }
  return own?.format === "pyh2o export" ? [own] : api.imported(text);
}

const letters = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");

const isOthers = (session) => !session.usable && session.made_with;

/** Why a session does not go on as it is, in a few words. */
function trouble(session) {
  if (!isOthers(session)) return session.why;
  return session.model ? "other settings" : `made with ${session.made_with}`;
}

/** A moment in unix seconds: of today the time, else the day. */
function when(moment) {
  const then = new Date(moment * 1000);
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday ? then.toLocaleTimeString([], { timeStyle: "short" }) : then.toLocaleDateString([], { dateStyle: "medium" });
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
