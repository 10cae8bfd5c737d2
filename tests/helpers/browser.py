"""A headless browser for the tests of the page."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from needed import needed

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_MS = 20_000
WIDE: dict[str, Any] = {"viewport": {"width": 1400, "height": 800}}
"""Settings of a screen that is wide enough for the memory panel."""

IDLE = "body:not(.generating)"
LIVE = "document.querySelector('#live').textContent"
STORY = "document.querySelector('.story-text').textContent"
CHOICES = """try {
  if (!localStorage.getItem("pyh2o-max-tokens")) localStorage.setItem("pyh2o-max-tokens", "6");
  if (!localStorage.getItem("pyh2o-memory")) localStorage.setItem("pyh2o-memory", "yes");
} catch {}"""
"""Short answers, and the memory panel if the screen is wide enough."""


@contextmanager
def browser() -> Iterator[Any]:
    """Return this machine's or Playwright's Chromium, or skip."""
    playwright = needed("playwright.sync_api", name="playwright")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    with playwright.sync_playwright() as running, TemporaryDirectory() as home:
        if program is None and not Path(running.chromium.executable_path).exists():
            pytest.skip("needs Chromium: install it, or name it in CHROMIUM")
        # Chromium has no sandbox as root, which containers run as.
        chromium = running.chromium.launch(
            executable_path=program,
            args=["--no-sandbox"],
            env={**os.environ, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home},
        )
        yield chromium
        chromium.close()


def axe_source() -> str:
    """Return the accessibility checker's source, or skip."""
    named = os.environ.get("AXE")
    if named is None:
        package = needed("axe_playwright_python")
        named = str(Path(package.__path__[0]) / "axe.min.js")
    return Path(named).read_text(encoding="utf-8")


class Tab:
    """A tab with the page, which records errors and requests."""

    def __init__(self, chromium: Any, address: str, **settings: Any) -> None:
        self.context = chromium.new_context(**settings)
        self.context.add_init_script(CHOICES)
        self.context.set_default_timeout(TIMEOUT_MS)
        self.context.set_default_navigation_timeout(TIMEOUT_MS)
        self.address = address
        self.errors: list[str] = []
        self.asked: set[str] = set()
        self.page = self.open()

    def open(self, place: str = "") -> Any:
        """Open another tab of the same user."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._on_console)
        page.on("request", lambda request: self.asked.add(request.url))
        page.goto(self.address + "/" + place)
        return page

    def _on_console(self, message: Any) -> None:
        # Some tests provoke failing requests, which the page reports itself.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def close(self) -> None:
        self.context.close()
        assert self.errors == []
        others = {url for url in self.asked if not url.startswith((self.address, "blob:"))}
        assert others == set(), "the page asked other hosts"


@contextmanager
def tabs(chromium: Any, address: str) -> Iterator[Callable[..., Tab]]:
    """Open a server's page as a new user. Errors are checked at the end."""
    address = address.removesuffix("/v1")
    opened = []

    def open_tab(place: str = "", **settings: Any) -> Tab:
        opened.append(Tab(chromium, address, **settings))
        if place:
            opened[-1].page.goto(f"{address}/{place}")
        return opened[-1]

    yield open_tab
    for each in opened:
        each.close()


def serious_findings(page: Any, axe: str) -> list[Any]:
    """Return the accessibility violations of the current page that axe considers serious."""
    page.wait_for_timeout(300)
    # Not add_script_tag: the page's content policy blocks such a script.
    page.evaluate(axe)
    result = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [
        (each["id"], [node["target"] for node in each["nodes"]][:4])
        for each in result["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def box_of(page: Any) -> Any:
    """Return the message box."""
    return page.get_by_label("Message", exact=True)


def send(page: Any, message: str) -> None:
    """Send a message."""
    box_of(page).fill(message)
    box_of(page).press("Enter")


def ask(page: Any, message: str) -> None:
    """Send a message and wait for its answer."""
    send(page, message)
    page.locator(f"{IDLE} .turn-actions").wait_for()


def press(page: Any, *names: str) -> None:
    """Press buttons one after the other."""
    for name in names:
        page.get_by_role("button", name=name, exact=True).click()


def edit_last(page: Any, text: str) -> None:
    """Edit the last message."""
    press(page, "Edit")
    page.get_by_role("dialog").get_by_role("textbox").fill(text)
    press(page, "OK")


def choose(page: Any, item: str) -> None:
    """Choose a menu item."""
    page.get_by_label("More").click()
    press(page, item)


def set_max_tokens(page: Any, n: int) -> None:
    """Limit the length of the next answers."""
    page.evaluate(f"localStorage.setItem('pyh2o-max-tokens', '{n}')")


def start_long_answer(page: Any, message: str = "a long answer") -> None:
    """Send a message, and wait until its endless answer has started."""
    set_max_tokens(page, 1_000_000)
    send(page, message)
    until(page, "document.querySelector('.turn:last-child .answer').textContent.length > 20")
    set_max_tokens(page, 6)


def stop_answer(page: Any) -> None:
    """Stop the answer and wait for its end."""
    page.keyboard.press("Escape")
    page.locator(f"{IDLE} .turn-actions").wait_for()


def name_of(page: Any) -> str:
    """Return the name of the open session."""
    return str(page.locator("h1").inner_text())


def open_session(page: Any, client: Any, name: str) -> None:
    """Open a session by its address."""
    page.evaluate(f"location.hash = '{client.address(name)}'")


def messages(page: Any) -> list[str]:
    """Return the messages on the page."""
    texts: list[str] = page.locator(".user-message").all_inner_texts()
    return texts


def answers(page: Any) -> list[str]:
    """Return the answers on the page, also hidden ones without layout."""
    texts: list[str] = page.locator(".answer").all_text_contents()
    return texts


def until(page: Any, condition: str) -> None:
    """Wait for a condition; playwright's own way evaluates strings, which the policy blocks."""
    end = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(30)


def expect_value(box: Any, value: str) -> None:
    """Wait until a field has a value."""
    expect = needed("playwright.sync_api", name="playwright").expect
    expect(box).to_have_value(value, timeout=TIMEOUT_MS)
