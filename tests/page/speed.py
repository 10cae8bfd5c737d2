"""Measure the speed of the page of `pyh2o serve` in this machine's Chromium.

    python tests/page/speed.py

The server has a tiny random model. The first paint is measured without a browser cache.
Needs the extras `server` and `test`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from browser import WIDE, Tab, browser
from serving_program import Program
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

ROUNDS, MAP_TOKENS = 5, 100_000

FIRST_PAINT = """async () => {
  const painted = () => performance.getEntriesByName("first-contentful-paint")[0];
  while (!painted()) await new Promise((done) => setTimeout(done, 20));
  return painted().startTime;
}"""

MAP_PAINT = """async (tokens) => {
  const folder = document.querySelector("script").src.replace("main.js", "");
  const { MemoryMap, paint } = await import(folder + "map.js");
  const positions = Array.from({ length: tokens / 8 }, (_, i) => 8 * i);
  const answer = {
    tokens, pairs: 90, recent_from: tokens - 1000, pinned: [[0, 4]], archived: [[0, tokens]],
    recalled: [[5000, 5064]],
    kept: { positions, rows: positions.map((p) => p % 90 + 1), scores: positions.map(() => 1) },
  };
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [112, 850];
  const times = [];
  for (let i = 0; i < 20; i += 1) {
    const startedAt = performance.now();
    paint(canvas, new MemoryMap(answer));
    canvas.getContext("2d").getImageData(0, 0, 1, 1);
    times.push(performance.now() - startedAt);
  }
  return times;
}"""


def main() -> None:
    """Print medians and ranges."""
    first_paints, map_paints = [], []
    with browser() as chromium, server() as address:
        for _ in range(1 + ROUNDS):
            tab = Tab(chromium, address, **WIDE)
            first_paints.append(tab.page.evaluate(FIRST_PAINT))
            map_paints += tab.page.evaluate(MAP_PAINT, MAP_TOKENS)
            tab.close()
    # The first round warms up the server and Chromium.
    report("first paint of the page, ms", first_paints[1:])
    report(f"a map of {MAP_TOKENS:,} tokens, ms", map_paints[20:])


@contextmanager
def server() -> Iterator[str]:
    """Start a server with a tiny model in a temporary folder, and return its address."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_gguf(Path(folder) / "tiny.gguf", seed=5, chat_template=CHAT_TEMPLATE)
        with Program("--model", path, "--port", 0, PYH2O_CHATS=folder) as running:
            yield running.address().removesuffix("/v1")


def report(name: str, values: Sequence[float]) -> None:
    """Print the median and the range."""
    print(f"{name}: {median(values):.1f} ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
