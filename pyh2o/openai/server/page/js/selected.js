// Which tokens a selection is: what is shown has no marks of Markdown, so letters, digits and pictures are compared.

const COUNTED = /[\p{L}\p{N}\p{So}\p{Extended_Pictographic}]/gu;

/** What is shown of an element before a selection. */
export function textBefore(element, selection) {
  const range = document.createRange();
  range.setStart(element, 0);
  range.setEnd(selection.startContainer, selection.startOffset);
  return range.toString();
}

/**
 * The tokens of some shown text: of all places that have it, the one with as much before it.
 * @param {{position: number, text: string}[]} tokens @param {string} shown @param {string} before
 * @returns {{start: number, end: number}|null}
 */
export function spanIn(tokens, shown, before) {
  const positions = []; // of the token that each letter is in
  let all = "";
  for (const { position, text } of tokens) {
    const letters = lettersOf(text);
    all += letters;
    for (let i = 0; i < letters.length; i += 1) positions.push(position);
  }
  const wanted = lettersOf(shown);
  if (!wanted) return null;
  const expected = lettersOf(before).length;
  let found = -1;
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + 1)) {
    if (found < 0 || Math.abs(at - expected) < Math.abs(found - expected)) found = at;
  }
  return found < 0 ? null : { start: positions[found], end: positions[found + wanted.length - 1] + 1 };
}

const lettersOf = (text) => (text.match(COUNTED) ?? []).join("");
