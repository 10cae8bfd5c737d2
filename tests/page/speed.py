"""How quick the page of `pyh2o serve` is, in the Chromium of this machine.

    python tests/page/speed.py

The server has a tiny random model, and the first paint is for a browser that has never been there.
It needs the extras `server` and `test`.
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

OPENED = """async () => {
  const painted = () => performance.getEntriesByName("first-contentful-paint")[0];
  while (!painted()) await new Promise((done) => setTimeout(done, 20));
  return painted().startTime;
}"""

DRAWN = """async (tokens) => {
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
    const begun = performance.now();
    paint(canvas, new MemoryMap(answer));
    canvas.getContext("2d").getImageData(0, 0, 1, 1);
    times.push(performance.now() - begun);
  }
  return times;
}"""


def main() -> None:
    """Measure, and print medians and ranges."""
    visits, drawn = [], []
    with browser() as chromium, server() as address:
        for _ in range(1 + ROUNDS):
            tab = Tab(chromium, address, **WIDE)
            visits.append(tab.page.evaluate(OPENED))
            drawn += tab.page.evaluate(DRAWN, MAP_TOKENS)
            tab.close()
    # before the first one neither the server nor Chromium were warm
    say("first paint of the page, ms", visits[1:])
    say(f"a map of {MAP_TOKENS:,} tokens drawn again, ms", drawn[20:])


@contextmanager
def server() -> Iterator[str]:
    """The address of a server with a tiny model, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_gguf(Path(folder) / "tiny.gguf", seed=5, chat_template=CHAT_TEMPLATE)
        with Program("--model", path, "--port", 0, PYH2O_CHATS=folder) as running:
            yield running.address().removesuffix("/v1")


def say(what: str, figures: Sequence[float]) -> None:
    """Print the median and the range."""
    print(f"{what}: {median(figures):.1f} ({min(figures):.1f} to {max(figures):.1f})")


if __name__ == "__main__":
    main()
