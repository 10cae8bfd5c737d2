// Numbers as people read them.

/** 12345 -> "12,345" */
export function count(n) {
  return Math.round(n).toLocaleString("en");
}

/** "1 token", "12,345 tokens" */
export function counted(n, what) {
  return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}

/** Bytes in the unit that leaves few digits. */
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit += 1) n /= 1024;
  return `${n < 10 && unit ? n.toFixed(1) : count(n)} ${units[unit]}`;
}

/** A duration: "0.42 s", "27 s", "3 min 5 s". */
export function seconds(n) {
  if (n < 10) return `${n.toFixed(n < 1 ? 2 : 1)} s`;
  if (n < 60) return `${Math.round(n)} s`;
  return `${Math.floor(n / 60)} min ${Math.round(n % 60)} s`;
}

/** Tokens in a second. */
export function speed(n) {
  return `${n < 100 ? n.toFixed(1) : count(n)} tokens/s`;
}

/** A share as a percentage. */
export function percent(share) {
  const value = share * 100;
  return `${value > 0 && value < 1 ? value.toFixed(2) : value.toFixed(value < 10 ? 1 : 0)} %`;
}

/** How long ago a moment was, in unix seconds. */
export function ago(moment) {
  const past = Math.max(0, Date.now() / 1000 - moment);
  if (past < 60) return "just now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  return new Date(moment * 1000).toLocaleDateString();
}
