"""The ways around the page: where the focus is, and what an address leads to."""

from __future__ import annotations

from typing import Any

from browser import say


def test_the_focus_is_where_it_was_behind_a_dialog(tab: Any, fake: Any) -> None:
    """And where it is when an answer ends, as an open menu is."""
    page = tab().page
    say(page, "hello")
    more = page.get_by_label("More")
    focus = "document.activeElement.getAttribute('aria-label')"
    for item, end in (("Settings", "Save"), ("Rename", "Cancel"), ("Keys", "Close")):
        more.press("Enter")
        page.get_by_role("button", name=item, exact=True).press("Enter")
        page.get_by_role("dialog").get_by_role("button", name=end, exact=True).press("Enter")
        page.get_by_role("dialog").wait_for(state="detached")
        page.wait_for_timeout(200)
        assert page.evaluate(focus) == "More", item
    box = page.get_by_label("Message", exact=True)
    box.fill("slowly")
    box.press("Enter")
    page.locator("body.making").wait_for()
    more.press("Enter")
    page.get_by_role("button", name="Export", exact=True).focus()
    fake.sessions["chat-1"].stopping = True
    page.locator("body:not(.making) .turn-actions").wait_for()
    page.wait_for_timeout(200)
    assert page.evaluate("document.activeElement.textContent") == "Export"


def test_an_address_that_was_written_by_hand_leads_somewhere(tab: Any, fake: Any) -> None:
    fake.add("100%", kind="story", text="All of it.")
    page = tab("#/s/100%").page
    page.locator(".chunk").get_by_text("All of it.").wait_for()
    page.goto(f"{fake.address}/#/s/50%")
    page.get_by_text("there is no session 50%").wait_for()
    page.get_by_text("Say something.").wait_for()
