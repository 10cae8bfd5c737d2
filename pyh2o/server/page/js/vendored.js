// Code in colours by highlight.js, and formulas by KaTeX: each is loaded when it is needed first (../vendor/README.md).

import { h } from "./dom.js";

// Longer code stays plain: it would be coloured again with each piece that comes.
const MOST_COLOURED = 50_000;
const HIGHLIGHT = "../vendor/highlight/highlight.min.js";
const KATEX = "../vendor/katex/katex.min";

/** What a library does at once when it is there, and later when it is not. */
function lazily(load) {
  let [library, loading] = [null, null];
  return (use) => {
    if (library) return use(library);
    loading ??= load().then((loaded) => { library = loaded; });
    // Without it code is plain and formulas are their sources.
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

/** Colours the code in an element, and names its language in another one. */
export function colour(element, source, language, label) {
  if (source.length > MOST_COLOURED) return;
  withHighlight((library) => {
    const { name } = library.getLanguage(language) ?? {};
    if (!name) return;
    label.textContent = name.split(",")[0];
    // Its tree and not its HTML: text stays text.
    const { rootNode } = library.highlight(source, { language, ignoreIllegals: true })._emitter;
    element.replaceChildren(...spans(rootNode));
  });
}

const spans = ({ children }) => children.map((child) => (typeof child === "string" ? child
  : h("span", { class: `hl-${child.scope?.split(/[.:]/)[0] ?? "part"}` }, ...spans(child))));

/** A formula in the words of LaTeX, in a line or displayed. */
export function formula(source, displayMode) {
  const element = h("span", { class: "math", dir: "ltr" }, source);
  withKatex((library) => {
    try {
      library.render(source.trim(), element, { displayMode, strict: "ignore", errorColor: "currentColor" });
    } catch ({ message }) { // what is no formula stays as it was written
      element.replaceChildren(h("code", { title: message }, source));
    }
  });
  return element;
}
