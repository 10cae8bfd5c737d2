// The model menu: models of the server, downloaded ones, and ones that can be downloaded.

import * as api from "./api.js";
import { ask, button, copyButton, formatBytes, formatNumber, h, reportErrors } from "./dom.js";

export class Models {
  constructor(page) {
    this.page = page;
    this.label = h("bdi");
    this.items = h("div", { class: "menu-items models" });
    this.element = h("details", { class: "menu model", toggle: () => this.element.open && this.fill() },
      h("summary", { title: "Choose a model" }, h("span", { class: "visually-hidden" }, "Model: "), this.label), this.items);
  }

  /** The name of the server's default model. */
  async first() {
    const machine = await reportErrors(api.machine);
    return machine?.served.find((model) => model.writes)?.name;
  }

  /** The model of the session or of the next one; null if the user has to choose one. */
  get current() {
    const { session, newSession } = this.page;
    return session?.usable === false ? null : (session ?? newSession).model;
  }

  /** Whether the current model "sees" or "hears"; true if that is unknown before loading it (the server checks again). */
  async can(ability) {
    const { served } = await api.machine();
    return served.find(({ name }) => name === this.current)?.[ability] ?? true;
  }

  /** Shows the name of the current model. */
  show() {
    this.label.textContent = this.current ?? "Choose a model";
    if (this.element.open) this.fill();
  }

  async fill() {
    const machine = await reportErrors(api.machine);
    if (!machine) return;
    const best = machine.models.filter(({ name }) => name === machine.choice);
    const others = machine.models.filter((model) => !best.includes(model));
    this.items.replaceChildren(
      ...section("On this server", machine.served.filter((model) => model.writes), (model) => this.choice(model)),
      ...section("Downloaded", machine.here, ({ name, bytes }) =>
        [nameAndDetails(name, formatBytes(bytes)), ...commandLine("start with", `pyh2o chat --web -m ${name}`)]),
      ...section("Recommended for this machine", best, (model) => download(model, machine)),
      h("details", { class: "more" }, h("summary", {}, best.length ? "Other models" : "Models to download"),
        list(others, (model) => download(model, machine))),
      h("p", {}, `${formatBytes(machine.memory_bytes)} of memory are free ${machine.gpus.length ? `on ${machine.gpus.join(", ")}` : "on this machine"}.`));
  }

  choice(model) {
    return [button(nameAndDetails(model.name, formatBytes(model.bytes)), () => {
      this.element.open = false;
      this.element.firstChild.focus(); // a closed dialog returns the focus, so it must be on a visible element before
      if (model.name !== this.current) this.choose(model.name); // the list may be older than the last choice
    }, { "aria-pressed": String(model.name === this.current) })];
  }

  async choose(model) {
    const { page } = this;
    if (!page.session) {
      page.newSession.model = model;
      return this.show();
    }
    const { id, tokens } = page.session;
    const text = `${model} reads the whole text (${formatNumber(tokens)} tokens) before its next answer.`;
    const changed = await ask("Change the model?", [h("p", {}, text)], "Change the model")
      && await reportErrors(() => api.change(id, { model }));
    if (changed && page.shownId === id) await page.reload(id);
  }
}

const list = (models, item) => h("ul", {}, ...models.map((model) => h("li", {}, ...item(model))));
const section = (title, models, item) => (models.length ? [h("h2", {}, title), list(models, item)] : []);

const nameAndDetails = (name, ...details) =>
  h("span", {}, h("strong", { dir: "auto" }, name), " ", h("small", {}, details.filter(Boolean).join(" · ")));

/** A model that can be downloaded, with its size, memory and cache. */
function download({ title, name, file_bytes: size, needed_bytes: needed, fits, full_bytes: full, evicting_bytes: evicting }, { window }) {
  const memory = needed === undefined ? "" : fits ? `needs ${formatBytes(needed)} of memory` : `needs ${formatBytes(needed)} of memory, more than is free`;
  const cache = full ? `cache for ${formatNumber(window)} tokens: ${formatBytes(evicting)} instead of ${formatBytes(full)}` : "";
  return [nameAndDetails(title, `${formatBytes(size)} download`, memory, cache), ...commandLine("in a terminal", `pyh2o models fetch ${name}`)];
}

function commandLine(label, command) {
  return [h("div", { class: "command" }, h("small", {}, `${label}: `, h("code", {}, command)),
    copyButton(command, { class: "small", "aria-label": `Copy ${command}` }))];
}
