// Text files that become part of a message.

// A model reads this for minutes already; more is most likely a mistake.
const MOST_BYTES = 1024 * 1024;

/**
 * The text of a file.
 * @param {File} file
 * @returns {Promise<{name: string, text: string}>}
 */
export async function readText(file) {
  if (file.size > MOST_BYTES) {
    const size = (file.size / MOST_BYTES).toFixed(1);
    throw new Error(`${file.name} has ${size} MiB: a message takes text files of up to 1 MiB`);
  }
  const data = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(data);
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // said below
  }
  throw new Error(`${file.name} is no text in UTF-8: only text files can become part of a message`);
}

/** A message with the files behind it. */
export function withFiles(message, files) {
  const parts = files.map(({ name, text }) => `${name}:\n\n${fenced(text)}`);
  return [message, ...parts].filter(Boolean).join("\n\n");
}

/** A fence that is longer than any in the text. */
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
