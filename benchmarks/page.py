"""How quick the page of `pyh2o serve` is with long texts, in the Chromium of this machine.

    python benchmarks/page.py --tokens 50000 --map-tokens 100000

The page runs with a fake of its API, so no model takes part. It needs the extras `server` and
`browser`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

WINDOW = {"width": 1400, "height": 900}

SCROLLED = """async (frames) => {
  const scroller = document.querySelector(".scroller");
  const step = scroller.scrollHeight / frames;
  const times = [];
  const frame = () => new Promise(requestAnimationFrame);
  scroller.scrollTop = 0;
  let last = await frame();
  for (let i = 0; i < frames; i += 1) {
    scroller.scrollTop += step;
    const now = await frame();
    times.push(now - last);
    last = now;
  }
  return times;
}"""

APPENDED = """async () => {
  const folder = document.querySelector("script").src.replace("main.js", "");
  const { StoryText } = await import(folder + "storytext.js");
  const paper = document.querySelector(".page-text");
  const text = new StoryText(paper);
  text.set(paper.textContent);
  const begun = performance.now();
  for (let i = 0; i < 1000; i += 1) text.add(" word");
  paper.getBoundingClientRect();
  return performance.now() - begun;
}"""

DRAWN = """async (tokens) => {
  const folder = document.querySelector("script").src.replace("main.js", "");
  const { MemoryMap } = await import(folder + "map.js");
  const { paint } = await import(folder + "paint.js");
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
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50_000, help="of the story")
    parser.add_argument("--map-tokens", type=int, default=100_000, help="of the memory map")
    parser.add_argument("--frames", type=int, default=200, help="that scroll through the story")
    given = parser.parse_args()

    # Imported here: they load the server's packages, which `--help` must not wait for.
    from browser import Tab, browser
    from fake_sessions import FakeServer, story_text

    fake = FakeServer()
    try:
        fake.add("long", kind="story", text="".join(story_text(given.tokens)))
        with browser() as chromium:
            tab = Tab(chromium, fake.address, viewport=WINDOW)
            page = tab.page
            page.goto(f"{fake.address}/#/s/long")
            page.locator(".chunk").first.wait_for()
            page.wait_for_timeout(1000)
            frames = page.evaluate(SCROLLED, given.frames)
            say(f"scrolling through {given.tokens:,} tokens, ms a frame", frames)
            say(
                f"{given.map_tokens:,} tokens onto the strip, ms",
                page.evaluate(DRAWN, given.map_tokens),
            )
            print(f"1,000 words more at the end: {page.evaluate(APPENDED):.1f} ms")
            tab.close()
    finally:
        fake.close()


def say(what: str, times: list[Any]) -> None:
    """Print the median and what is rare."""
    ordered = sorted(float(each) for each in times)
    rare = ordered[int(len(ordered) * 0.95)]
    print(f"{what}: median {median(ordered):.1f}, 95 % {rare:.1f}, most {ordered[-1]:.1f}")


if __name__ == "__main__":
    main()
