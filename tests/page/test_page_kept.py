"""What the browser keeps: drafts, files, nothing at all; and what it prints."""

from __future__ import annotations

import re
from pathlib import Path
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


def test_attached_files_stay_with_their_draft(tab: Any, fake: Any, tmp_path: Path) -> None:
    """Over another session, an edit, a reload and a new name; once sent they are gone."""
    page = tab().page
    say(page, "hello")
    note, poem = tmp_path / "note.txt", tmp_path / "poem.txt"
    note.write_text("a note")
    poem.write_text("roses")
    picker = page.get_by_label("Text files", exact=True)
    chips = page.locator(".chip")
    picker.set_input_files(note)
    chips.get_by_text("note.txt").wait_for()
    page.get_by_role("link", name="New chat").click()
    page.get_by_text("Say something.").wait_for()
    assert chips.count() == 0
    picker.set_input_files(poem)
    chips.get_by_text("poem.txt").wait_for()
    page.reload()
    chips.get_by_text("poem.txt").wait_for()
    say(page, "read")
    assert fake.sessions["chat-2"].turns[0]["user"] == "read\n\npoem.txt:\n\n```\nroses\n```"
    page.get_by_role("link", name="chat-1").click()
    chips.get_by_text("note.txt").wait_for()
    page.get_by_role("button", name="Edit", exact=True).click()
    assert chips.count() == 0
    page.reload()
    chips.get_by_text("note.txt").wait_for()
    page.get_by_label("More").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name", exact=True).fill("other")
    page.get_by_role("button", name="OK").click()
    page.get_by_role("heading", name="other").wait_for()
    chips.get_by_text("note.txt").wait_for()
    say(page, "and this")
    assert fake.sessions["other"].turns[1]["user"] == "and this\n\nnote.txt:\n\n```\na note\n```"
    page.reload()
    page.locator(".turn").nth(1).wait_for()
    assert chips.count() == 0
    page.get_by_role("link", name="New chat").click()
    page.get_by_text("Say something.").wait_for()
    assert chips.count() == 0


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_the_whole_text_is_printed(tab: Any, fake: Any, kind: str) -> None:
    long = " ".join(f"word {n}" for n in range(4000))
    session = fake.add("long", kind=kind, **({"text": long} if kind == "story" else {}))
    if kind == "conversation":
        session.turns = [
            {"user": f"message {n}", "answer": long[:2000], "finish": "stop", "attempt": 0}
            for n in range(30)
        ]
        session.touch()
    page = tab("#/s/long").page
    page.locator(".turn, .chunk").last.wait_for(state="attached")
    sheets = re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))
    assert len(sheets) > 8
