// Highlights code with highlight.js and renders formulas with KaTeX. Both are loaded at their first use (../vendor/README.md).

import { h } from "./dom.js";

// Longer code stays plain, because it would be highlighted again with each piece of a streamed answer.
const MAX_HIGHLIGHTED = 50_000;
const HIGHLIGHT = "../vendor/highlight/highlight.min.js";
const KATEX = "../vendor/katex/katex.min";

/** Returns a function that calls `use` with a library, at once if it is loaded, else after loading it. */
function lazily(load) {
  let [library, loading] = [null, null];
  return (use) => {
    if (library) return use(library);
    loading ??= load().then((loaded) => { library = loaded; });
    // If loading fails, code stays plain and formulas show their source.
    loading.then(() => use(library), () => null);
  };
}

const withHighlight = lazily(async () => (await import(HIGHLIGHT)).default);

const withKatex = lazily(async () => {
  const href = new URL(`${KATEX}.css`, import.meta.url).href;
  await Promise.all([import(`${KATEX}.js`), new Promise((load, error) => {
    document.head.append(h("link", { rel: "stylesheet", href, load, error }));
  })]);
  return globalThis.katex;
});

/** Highlights the code in an element, and sets the label to the language's name. */
export function highlight(element, source, language, label) {
  if (source.length > MAX_HIGHLIGHTED) return;
  withHighlight((library) => {
    const { name } = library.getLanguage(language) ?? {};
    if (!name) return;
    label.textContent = name.split(",")[0];
    // Its token tree instead of its HTML, so that text cannot become markup.
    const { rootNode } = library.highlight(source, { language, ignoreIllegals: true })._emitter;
    element.replaceChildren(...spans(rootNode));
  });
}

const spans = ({ children }) => children.map((child) => (typeof child === "string" ? child
  : h("span", { class: `hl-${child.scope?.split(/[.:]/)[0] ?? "part"}` }, ...spans(child))));

/** Renders a LaTeX formula, inline or in display mode. */
export function formula(source, displayMode) {
  const element = h("span", { class: "math", dir: "ltr" }, source);
  withKatex((library) => {
    try {
      library.render(source.trim(), element, { displayMode, strict: "ignore", errorColor: "currentColor" });
    } catch ({ message }) { // invalid formulas show their source
      element.replaceChildren(h("code", { title: message }, source));
    }
  });
  return element;
}
