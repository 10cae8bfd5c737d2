// The model's name on top, and the list below it: what the server has, what lies here, and what could be fetched.

import * as api from "./api.js";
import { ask, button, bytes, careful, copyButton, count, h } from "./dom.js";

export class Models {
  constructor(page) {
    this.page = page;
    this.label = h("bdi");
    this.items = h("div", { class: "menu-items models" });
    this.element = h("details", { class: "menu model", toggle: () => this.element.open && this.fill() },
      h("summary", { title: "Choose a model" }, h("span", { class: "unseen" }, "Model: "), this.label), this.items);
  }

  /** The model that the server takes first. */
  async first() {
    const machine = await careful(api.machine);
    return machine?.served.find((model) => model.writes)?.name;
  }

  /** The model that a session goes on with, or a new one begins with; none where it has to be chosen. */
  get now() {
    const { session, draft } = this.page;
    return session?.usable === false ? null : (session ?? draft).model;
  }

  /** Whether it "sees" or "hears"; of one that is not loaded yet nobody knows, and the server tells in time. */
  async takes(sense) {
    const { served } = await api.machine();
    return served.find(({ name }) => name === this.now)?.[sense] ?? true;
  }

  /** Shows the name of the model that is in use. */
  show() {
    this.label.textContent = this.now ?? "Choose a model";
    if (this.element.open) this.fill();
  }

  async fill() {
    const machine = await careful(api.machine);
    if (!machine) return;
    const best = machine.models.filter(({ name }) => name === machine.choice);
    const others = machine.models.filter((model) => !best.includes(model));
    this.items.replaceChildren(
      ...section("On this server", machine.served.filter((model) => model.writes), (model) => this.choice(model)),
      ...section("Fetched already", machine.here, ({ name, bytes: size }) =>
        [named(name, bytes(size)), ...typed("start with", `pyh2o chat --web -m ${name}`)]),
      ...section("The best for this machine", best, (model) => fetched(model, machine)),
      h("details", { class: "more" }, h("summary", {}, best.length ? "Other models" : "Models to fetch"),
        list(others, (model) => fetched(model, machine))),
      h("p", {}, `${bytes(machine.memory_bytes)} of memory are free ${machine.gpus.length ? `on ${machine.gpus.join(", ")}` : "on this machine"}.`));
  }

  choice(model) {
    return [button(named(model.name, bytes(model.bytes)), () => {
      this.element.open = false;
      this.element.firstChild.focus(); // a dialog gives the focus back to where it was
      if (model.name !== this.now) this.choose(model.name); // the list may be older than the last choice
    }, { "aria-pressed": String(model.name === this.now) })];
  }

  async choose(model) {
    const { page } = this;
    if (!page.session) {
      page.draft.model = model;
      return this.show();
    }
    const { name, tokens } = page.session;
    const text = `${model} reads the text, ${count(tokens)} tokens, before its next answer. A copy stays in the list as it is now.`;
    const changed = await ask("Go on with another model?", [h("p", {}, text)], "Change the model")
      && await careful(() => api.change(name, { model }));
    if (changed && page.viewed === name) await page.reload(name);
  }
}

const list = (models, item) => h("ul", {}, ...models.map((model) => h("li", {}, ...item(model))));
const section = (title, models, item) => (models.length ? [h("h2", {}, title), list(models, item)] : []);

const named = (name, ...about) => h("span", {}, h("strong", { dir: "auto" }, name), " ", h("small", {}, about.filter(Boolean).join(" · ")));

/** A model that can be fetched: what it takes, and what it brings. */
function fetched({ title, name, file_bytes: size, needed_bytes: needed, fits, full_bytes: full, evicting_bytes: ours }, { window }) {
  const room = needed === undefined ? "" : fits ? `takes ${bytes(needed)}` : `needs ${bytes(needed)}, more than is free`;
  const cache = full ? `its cache for ${count(window)} tokens ${bytes(ours)} instead of ${bytes(full)}` : "";
  return [named(title, `${bytes(size)} to fetch`, room, cache), ...typed("in a terminal", `pyh2o models fetch ${name}`)];
}

function typed(what, command) {
  return [h("div", { class: "typed" }, h("small", {}, `${what}: `, h("code", {}, command)),
    copyButton(command, { class: "small", "aria-label": `Copy ${command}` }))];
}
