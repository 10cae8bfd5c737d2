"""What the browser keeps for a person: drafts and files, and where it keeps nothing."""

from __future__ import annotations

from typing import Any

import pytest

from browser import answers, say, shows

# How Chromium has it for who blocks cookies.
FORBIDDEN = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
}"""
FULL = (
    """Storage.prototype.setItem = () => { throw new DOMException("no", "QuotaExceededError"); };"""
)


@pytest.mark.parametrize("trouble", [FORBIDDEN, FULL], ids=["forbidden", "full"])
def test_the_page_works_where_the_browser_keeps_nothing(tab: Any, fake: Any, trouble: str) -> None:
    fake.api_key = "secret"
    one = tab()
    one.context.add_init_script(trouble)
    page = one.page
    page.reload()
    page.get_by_label("API key (kept").fill("secret")
    page.get_by_role("button", name="OK").click()
    say(page, "hello")
    page.get_by_label("More").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("2")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("button", name="Memory", exact=True).click()
    say(page, "again")
    assert answers(page)[1] == "Answer 1"
    page.get_by_label("Message", exact=True).fill("a draft")
    page.get_by_role("link", name="New chat").click()
    page.get_by_text("Say something.").wait_for()
    page.go_back()
    shows(page.get_by_label("Message", exact=True), "a draft")
    page.get_by_role("link", name="New story").click()
    page.get_by_label("Tokens of a passage").fill("3")
    page.get_by_label("Beginning of the story").fill("Once")
    page.get_by_role("button", name="Write", exact=True).click()
    page.get_by_text("Once passage 0 of").wait_for()
