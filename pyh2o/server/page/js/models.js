// The model's name on top, and the list below it: what the server has, what lies here, and what could be fetched.

import * as api from "./api.js";
import { ask, button, bytes, careful, copyButton, count, h } from "./dom.js";

const OVERHEAD = 1.2; // what a model takes, in sizes of its file: weights, cache and buffers

export class Models {
  constructor(page) {
    this.page = page;
    this.names = []; // of those that the server has, and that write
    this.label = h("bdi");
    this.items = h("div", { class: "menu-items models" });
    this.element = h("details", { class: "menu model", toggle: () => this.element.open && this.fill() },
      h("summary", { title: "Choose a model" }, h("span", { class: "unseen" }, "Model: "), this.label), this.items);
  }

  async start() {
    const machine = await careful(api.machine);
    this.names = machine?.models.filter((model) => model.writes).map(({ name }) => name) ?? [];
    return this.names[0];
  }

  /** The model that a session goes on with, or a new one begins with; none where it has to be chosen. */
  get now() {
    const { session, draft } = this.page;
    return session?.usable === false ? null : (session ?? draft).model;
  }

  /** Shows the name of the model that is in use. */
  show() {
    this.label.textContent = this.now ?? "Choose a model";
    if (this.element.open) this.fill();
  }

  async fill() {
    const machine = await careful(api.machine);
    if (!machine) return;
    const of = (state) => machine.models.filter((model) => model.state === state && model.writes !== false);
    const section = (title, models, item) => (models.length
      ? [h("h2", {}, title), h("ul", {}, ...models.map((model) => h("li", {}, ...item(model))))] : []);
    this.items.replaceChildren(
      ...section("On this server", of("served"), (model) => this.choice(model)),
      ...section("On this machine", of("here"), (model) => [
        ...about(model), ...typed("to have it here, start with", `pyh2o chat --web -m ${model.name}`)]),
      ...section("To fetch", of("to fetch"), (model) => [
        ...about(model, fits(model, machine)), ...typed("in a terminal", model.command)]),
      h("p", {}, `This machine has ${bytes(machine.memory)} of memory, of which ${bytes(machine.free)} are free.`));
  }

  choice(model) {
    const isNow = model.name === this.now;
    return [button(h("span", {}, ...about(model)), () => {
      this.element.open = false;
      this.element.firstChild.focus(); // a dialog gives the focus back to where it was
      if (!isNow) this.choose(model.name);
    }, { "aria-pressed": String(isNow) })];
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

function about({ name, title, bytes: size }, more = "") {
  return [h("strong", { dir: "auto" }, title ?? name), " ", h("small", {}, [bytes(size), more].filter(Boolean).join(" · "))];
}

/** Whether a model's memory is there. */
function fits({ bytes: size }, { memory }) {
  const needed = OVERHEAD * size;
  return needed < memory ? `takes about ${bytes(needed)} of memory` : `needs about ${bytes(needed)} of memory, more than there is`;
}

function typed(what, command) {
  return [h("small", { class: "typed" }, `${what}: `, h("code", {}, command)), copyButton(command, { class: "small", "aria-label": `Copy ${command}` })];
}
