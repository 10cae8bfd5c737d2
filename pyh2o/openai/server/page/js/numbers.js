// The figures of a session: small, and as they change.

import { h } from "./dom.js";
import { bytes, count, percent, seconds, speed } from "./format.js";

export class Numbers {
  constructor() {
    this.kv = {};
    this.element = h("dl", { class: "numbers" });
  }

  clear() {
    this.kv = {};
    this.element.replaceChildren();
  }

  /** Takes what came; figures that did not come stay as they were. */
  set(kv) {
    for (const [name, value] of Object.entries(kv ?? {})) {
      if (value !== undefined && value !== null) this.kv[name] = value;
    }
    const rows = this.rows().filter(([, value]) => value !== null);
    this.element.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  rows() {
    const kv = this.kv;
    const given = (value, words) => (value || value === 0 ? words(value) : null);
    return [
      ["Text", given(kv.position, (n) => `${count(n)} tokens`)],
      ["Cache", given(kv.used, (n) => `${count(n)} of ${count(kv.capacity)} cells`)],
      ["Memory", given(kv.bytes, (n) => `${bytes(n)}, full cache ${bytes(kv.bytes_full)}`)],
      ["Archive", given(kv.bytes_archive || null, bytes)],
      ["Compactions", given(kv.compactions, count)],
      ["Attention found", given(kv.found_share, percent)],
      ["Speed", given(kv.tokens_per_second, speed)],
      ["First token", given(kv.first_token_seconds, (n) => `after ${seconds(n)}`)],
    ];
  }
}
