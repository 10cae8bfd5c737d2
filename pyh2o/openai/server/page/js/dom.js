// Elements from words: text always goes in as text, so no answer can become part of the page.

/**
 * @param {string} tag
 * @param {Record<string, any>} [attributes] a function becomes a listener, `true` an empty attribute
 * @param {...(Node|string|null|false|undefined)} children
 * @returns {any} the element
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child || child === ""));
  return element;
}

/** A button that submits nothing. */
export function button(label, click, attributes = {}) {
  return h("button", { type: "button", click, ...attributes }, label);
}

/** The element with this id, which the page has from the start. */
export function byId(id) {
  return /** @type {any} */ (document.getElementById(id));
}

/** Whether somebody asked for less movement. */
export function behavior() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
}

/** Calls `work` at most once in `wait` ms, the last time after the last call. */
export function throttled(work, wait) {
  let timer = 0;
  let last = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      last = performance.now();
      work(...values);
    }, Math.max(0, last + wait - performance.now()));
  };
}
