"""Take the pictures of the page of `pyh2o serve` that README.md and the docs show.

    python scripts/take_screenshots.py

The demo model writes what is on them: a chat and a story in a small window, so that most of both
has left the cache. It needs the extras `server`, `browser` and `plot`, and takes some minutes.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
DOCS = ROOT / "docs"

CACHE = ("--ctx", 1024, "--hh", 160, "--recent", 96, "--slack", 32, "--recall", 64)
CHAT, STORY = "A week by the sea", "The lighthouse"
SYSTEM = "You are a helpful friend. Answer in two or three short sentences."
MESSAGES = (
    "My dog is called Pixel, and we want to spend a week by the sea.",
    "What should we pack for the beach?",
    "What can we cook in a small kitchen there?",
    "How do tides work?",
    "Why is the sea salty?",
    "Tell me about lighthouses.",
    "What shall we do when it rains?",
    "What is my dog called?",
)
OPENING = (
    "Once upon a time, in a town by the sea, there lived a lighthouse keeper who had never "
    "seen the sun rise."
)
PASSAGES, PASSAGE_TOKENS, ANSWER_TOKENS = 3, 300, 90
DESK = {"viewport": {"width": 1280, "height": 800}}
PHONE = {
    "viewport": {"width": 390, "height": 780},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}
MOST_BYTES = 150_000


def main() -> int:
    """Have them written, and take the pictures."""
    from browser import Tab, browser
    from serving_program import Program

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PYH2O_CHATS": folder, "PYH2O_CONFIG": os.devnull}
        server = Program("--port", 0, *CACHE)
        try:
            address = server.address().removesuffix("/v1")
            with browser() as chromium:
                for kind, scheme, take in (
                    (DESK, "light", chat_pictures),
                    (DESK, "dark", story_picture),
                    (PHONE, "light", phone_picture),
                ):
                    tab = Tab(chromium, address, color_scheme=scheme, **kind)
                    take(tab.page, address)
                    tab.close()
        finally:
            server.process.kill()
            server.end()
    return 0


def chat_pictures(page: Any, address: str) -> None:
    """A conversation that has evicted, pinned and found; and what one head has kept of it."""
    from browser import say

    begin(address, name=CHAT, system=SYSTEM)
    page.evaluate(f"localStorage.setItem('pyh2o-max-tokens', '{ANSWER_TOKENS}')")
    page.goto(f"{address}/#/s/{CHAT}")
    page.get_by_role("heading", name=CHAT).wait_for()
    for n, message in enumerate(MESSAGES):
        say(page, message)
        if not n:
            page.locator(".said").select_text()
            page.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_text("looked at with").first.wait_for()
    shade(page)
    save(page, "page-chat.png")
    page.get_by_role("button", name="Layers and heads").click()
    page.get_by_role("button", name="Draw all").click()
    page.wait_for_timeout(6000)  # all are drawn one after the other
    page.wait_for_load_state("networkidle")
    page.get_by_role("button", name=re.compile("Layer 12, head 1")).click()
    page.get_by_text("Layer 12, head 1:").wait_for()
    save(page, "page-heads.png")


def story_picture(page: Any, address: str) -> None:
    """A story in the dark, of which little is left in the cache."""
    begin(address, name=STORY, kind="story", text=OPENING, sampling={"seed": 4, "temperature": 0.9})
    page.goto(f"{address}/#/s/{STORY}")
    page.get_by_label("Tokens of a passage").fill(str(PASSAGE_TOKENS))
    for _ in range(PASSAGES):
        page.get_by_role("button", name="Write on").click()
        page.wait_for_timeout(500)  # it has begun, or is over already
        page.locator("body:not(.making)").wait_for()
    shade(page)
    save(page, "page-story.png")


def phone_picture(page: Any, address: str) -> None:
    """The chat on a phone."""
    page.goto(f"{address}/#/s/{CHAT}")
    page.locator(".turn").nth(len(MESSAGES) - 1).wait_for()
    save(page, "page-phone.png")


def begin(address: str, **body: Any) -> None:
    """Begin a session."""
    body = {"sampling": {"seed": 4, "temperature": 0.4}, **body}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/sessions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).close()


def shade(page: Any) -> None:
    """Show the text in the colours of the map."""
    page.get_by_role("button", name="Shade the text").click()
    page.locator("[data-p]").first.wait_for(state="attached")


def save(page: Any, name: str) -> None:
    """Save what is in sight, in colours that nobody can tell from its own."""
    from PIL import Image

    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    small = picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(DOCS / name, optimize=True)
    size = (DOCS / name).stat().st_size
    print(f"docs/{name}: {size:,} bytes")
    assert size < MOST_BYTES


if __name__ == "__main__":
    sys.exit(main())
