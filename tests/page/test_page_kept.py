"""What the browser keeps: drafts, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import browser as browsers
from browser import IDLE, box_of, choose, edit_last, press, said, say, shows

# How Chromium has it for who blocks cookies.
FORBIDDEN = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
}"""
FULL = (
    """Storage.prototype.setItem = () => { throw new DOMException("no", "QuotaExceededError"); };"""
)


@pytest.mark.parametrize("trouble", [FORBIDDEN, FULL], ids=["forbidden", "full"])
def test_the_page_works_where_the_browser_keeps_nothing(
    serve: Callable[..., Any], chromium: Any, endless: None, trouble: str
) -> None:
    client = serve(api_key="secret")
    with browsers.tabs(chromium, client.server.address) as open_tab:
        one = open_tab()
        one.context.add_init_script(trouble)
        page = one.page
        page.reload()
        page.get_by_label("API key (kept").fill("secret")
        press(page, "OK")
        choose(page, "Settings")
        page.get_by_label("Max tokens").fill("2")
        press(page, "Save")
        say(page, "hello")
        page.get_by_text("The answer was cut by its limit.").wait_for()
        press(page, "Memory")
        box_of(page).fill("a draft")
        page.get_by_role("link", name="New chat").click()
        page.get_by_text("Say something.").wait_for()
        page.go_back()
        shows(box_of(page), "a draft")
        page.get_by_role("link", name="New story").click()
        page.get_by_label("Tokens of a passage").fill("3")
        page.get_by_label("Beginning of the story").fill("Once")
        press(page, "Write")
        page.get_by_role("button", name="Undo passage").wait_for()


def test_drafts_are_kept_for_each_session(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    page = tab().page
    box = box_of(page)
    box.fill("to be sent some day")
    page.reload()
    shows(box, "to be sent some day")
    box.fill("")
    page.evaluate("location.hash = '#/s/one'")
    page.locator(".said").wait_for()
    box.fill("a long draft")
    edit_last(page, "first, in other words")
    page.locator(".said").get_by_text("first, in other words").wait_for()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    shows(box, "a long draft")
    choose(page, "Rename")
    page.get_by_role("textbox", name="Name").fill("two")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="two").wait_for()
    page.reload()
    page.locator(".said").wait_for()
    assert said(page) == ["first, in other words"]
    shows(box, "a long draft")
    page.get_by_role("link", name="New chat").click()
    page.get_by_text("Say something.").wait_for()
    shows(box, "")
    page.get_by_role("link", name="New story").click()
    beginning = page.get_by_label("Beginning of the story")
    beginning.fill("It was a dark and stormy night")
    page.reload()
    shows(beginning, "It was a dark and stormy night")
