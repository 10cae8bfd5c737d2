"""How quick the page of `pyh2o serve` is, in the Chromium of this machine.

    python tests/page/speed.py --map-tokens 100000

The server has a tiny random model, and the first paint is for a browser that has never been there.
It needs the extras `server`, `browser` and `test`. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

OPENED = """async () => {
  const own = (entry) => !new URL(entry.name).pathname.startsWith("/v1/");
  const painted = () => performance.getEntriesByName("first-contentful-paint")[0];
  while (!painted()) await new Promise((done) => setTimeout(done, 20));
  const files = [
    ...performance.getEntriesByType("navigation"),
    ...performance.getEntriesByType("resource").filter(own),
  ];
  const bytes = files.reduce((sum, file) => sum + file.encodedBodySize, 0);
  return [painted().startTime, bytes];
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
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map-tokens", type=int, default=100_000, help="of the memory map")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()

    # Imported here: they load the server's packages, which `--help` must not wait for.
    from browser import Tab, browser

    visits, drawn = [], []
    with browser() as chromium, server() as address:
        for _ in range(1 + given.rounds):
            tab = Tab(chromium, address, viewport={"width": 1400, "height": 900})
            visits.append(tab.page.evaluate(OPENED))
            drawn += tab.page.evaluate(DRAWN, given.map_tokens)
            tab.close()
    # before the first one neither the server nor Chromium were warm
    paints, sizes = zip(*visits[1:], strict=True)
    print("| | median | range | 95 % up to |\n|---|---|---|---|")
    say("first paint of the page, ms", paints)
    say("its files, kB", [size / 1000 for size in sizes])
    say(f"a map of {given.map_tokens:,} tokens drawn again, ms", drawn[20:])


@contextmanager
def server() -> Iterator[str]:
    """The address of a server with a tiny model, in a folder of its own."""
    from serving_program import Program
    from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYH2O_CHATS"] = folder
        path = write_tiny_gguf(Path(folder) / "tiny.gguf", seed=5, chat_template=CHAT_TEMPLATE)
        with Program("--model", path, "--port", 0) as running:
            yield running.address().removesuffix("/v1")


def say(what: str, figures: Sequence[float]) -> None:
    """Print the median, the range, and what 95 % of the figures stay within."""
    ordered = sorted(figures)
    most = ordered[int(0.95 * (len(ordered) - 1))]
    shown = f"{median(ordered):.1f} | {ordered[0]:.1f}-{ordered[-1]:.1f} | {most:.1f}"
    print(f"| {what} | {shown} |")


if __name__ == "__main__":
    main()
