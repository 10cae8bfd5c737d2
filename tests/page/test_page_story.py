"""Stories on the page: continue, cut, undo, edit, long texts."""

from __future__ import annotations

import json
import re
from typing import Any

from browser import IDLE, LIVE, STORY, WIDE, choose, expect_value, name_of, press, until


def story_text(n: int) -> str:
    """Return a story of `n` words with some paragraphs."""
    return "".join(f" {i}th" if i % 90 else "\n\nOnce," for i in range(n))


def continue_story(page: Any, n_tokens: int = 10) -> None:
    page.get_by_label("Tokens per passage").fill(str(n_tokens))
    page.get_by_role("button", name=re.compile("^(Write|Continue)")).click()
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()


def test_a_story_can_be_started_continued_stopped_and_undone(tab: Any, client: Any) -> None:
    """It starts without the system prompt, which is for chats only."""
    page = tab().page
    choose(page, "Settings")
    page.get_by_label("System prompt").fill("You are a sailor.")
    press(page, "Save")
    page.get_by_role("link", name="New story").click()
    page.get_by_label("Start of the story").fill("Once 🐋 upon a time,")
    continue_story(page, 40)
    name = name_of(page)
    first = client.got(f"/{name}")
    assert first["text"].startswith("Once 🐋 upon a time,")
    until(page, f"Array.from({STORY}).length === {len(first['text'])}")
    page.get_by_label("Tokens per passage").fill("1000000")
    press(page, "Continue")
    until(page, f"Array.from({STORY}).length > {len(first['text'])}")
    # forced: the growing text moves the button
    page.get_by_role("button", name="Stop").click(force=True)
    page.locator(IDLE).wait_for()
    second = client.got(f"/{name}")
    assert second["text"].startswith(first["text"])
    assert first["tokens"] < second["tokens"] < 900_000
    until(page, f"Array.from({STORY}).length === {len(second['text'])}")
    assert page.evaluate(STORY) == second["text"]
    press(page, "Undo passage")
    until(page, f"{LIVE} === 'The last passage was removed.'")
    assert client.got(f"/{name}")["text"] == first["text"] == page.evaluate(STORY)


def test_a_story_has_a_note_and_a_lorebook(tab: Any, client: Any) -> None:
    """They are set before the start or later, and are not part of the text or its positions."""
    page = tab("#/new-story", **WIDE).page
    book = {"entries": [{"keys": ["comet"], "content": "Comets bring luck."}]}
    for name, content in (("bad.json", b"luck"), ("book.json", json.dumps(book).encode())):
        choose(page, "Settings")
        page.get_by_label("Author's note").fill("Be sad.")
        page.get_by_label("Lorebook").set_input_files(
            {"name": name, "mimeType": "application/json", "buffer": content}
        )
        press(page, "Save")
        if name == "bad.json":
            page.get_by_text("bad.json is not a lorebook").wait_for()
    page.get_by_label("Start of the story").fill("A comet came. And")
    continue_story(page, 20)
    continue_story(page, 20)
    name = name_of(page)
    session = client.got(f"/{name}")
    assert (session["note"], session["lore_entries"]) == ("Be sad.", 1)
    assert page.evaluate(STORY) == session["text"]
    assert "luck" not in session["text"]
    tokens = client.got(f"/{name}/tokens")
    assert "".join(tokens["texts"]) == session["text"]
    press(page, "Shade the text")
    until(page, "document.querySelectorAll('.chunk [data-p]').length")
    assert page.evaluate(STORY) == session["text"]
    choose(page, "Settings")
    page.get_by_text("1 entry now.").wait_for()
    page.get_by_label("Author's note").fill("")
    press(page, "Save")
    page.locator("dialog").wait_for(state="detached")
    page.wait_for_timeout(300)
    assert client.got(f"/{name}")["note"] == ""
    page.get_by_role("link", name="New chat").click()
    page.get_by_role("heading", name="New chat").wait_for()
    choose(page, "Settings")
    expect_value(page.get_by_label("Author's note"), "")


def test_a_story_continues_from_the_cursor(tab: Any, client: Any) -> None:
    """Characters count as code points, also after an emoji."""
    start = "A 🐋 swims. " * 5 + "And then it sleeps."
    client.story("whale", start)
    page = tab(client.address("whale")).page
    page.locator(".chunk").wait_for()
    page.get_by_label("Tokens per passage").fill("10")
    page.locator(".scroller").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Continue from the cursor").wait_for()
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()
    text = client.got("/whale")["text"]
    assert text.startswith("A 🐋 swims. " * 5 + "And then ")
    assert "it sleeps" not in text
    until(page, f"Array.from({STORY}).length === {len(text)}")
    assert page.evaluate(STORY) == text


def test_cutting_much_text_needs_a_confirmation(tab: Any, client: Any) -> None:
    text = story_text(1000)
    client.story("long", text)
    page = tab(client.address("long")).page
    page.get_by_label("Tokens per passage").fill("5")
    page.locator(".chunk").first.click(position={"x": 100, "y": 100})
    press(page, "Continue from the cursor")
    page.get_by_role("heading", name="Delete the rest?").wait_for()
    page.keyboard.press("Escape")
    assert client.got("/long")["text"] == text
    press(page, "Continue from the cursor", "Delete and continue")
    until(page, f"{STORY}.length < {len(text)}")
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()
    assert len(client.got("/long")["text"]) < len(text)


def test_the_strip_scrolls_to_any_position_of_a_long_story(tab: Any, client: Any) -> None:
    client.story("long", story_text(20_000))
    page = tab(client.address("long"), **WIDE).page
    n = client.got("/long")["tokens"]
    page.get_by_text(f"{n:,} tokens not read yet.").wait_for()
    press(page, "Shade the text")
    strip = page.get_by_role("slider", name="Position in the text")
    strip.focus()
    strip.press("Home")
    texts = client.got("/long/tokens?start=0&end=20")["texts"]
    first = next(position for position, text in enumerate(texts) if text)
    page.locator(f'[data-p="{first}"]').wait_for(state="attached")
    box = strip.bounding_box()
    strip.click(position={"x": 1, "y": box["height"] / 2})
    shown = "[...document.querySelectorAll('[data-p]')]"
    until(page, f"{shown}.some((each) => each.dataset.p > {0.4 * n})")
    found = page.evaluate(
        f"{shown}.slice(50, 150).map((t) => [Number(t.dataset.p), t.textContent])"
    )
    first, last = found[0][0], found[-1][0]
    texts = client.got(f"/long/tokens?start={first}&end={last + 1}")["texts"]
    assert [text for _, text in found] == texts
    assert page.locator("[data-p]").count() < 20_000


def test_a_story_can_be_edited(tab: Any, client: Any) -> None:
    """Esc discards an edit; a conflicting edit is shown for copying."""
    client.story("whale", "A 🐋 swims. " * 800 + "And then it sleeps.")
    page = tab(client.address("whale")).page
    page.locator(".chunk").first.wait_for()
    text = client.got("/whale")["text"]
    press(page, "Edit")
    page.keyboard.press("Control+Home")
    page.keyboard.type("Once a ")
    for _ in range(2):
        page.keyboard.press("Delete")
    page.keyboard.press("Control+End")
    for _ in range(len("sleeps.")):
        page.keyboard.press("Backspace")
    page.keyboard.type("dreams?\n🐟!")
    press(page, "Done")
    until(page, f"{LIVE} === 'The text was changed.'")
    changed = client.got("/whale")["text"]
    assert changed == "Once a " + text[2:].removesuffix("sleeps.") + "dreams?\n🐟!"
    assert page.evaluate(STORY) == changed
    press(page, "Edit")
    page.keyboard.type("gone")
    page.keyboard.press("Escape")
    assert page.evaluate(STORY) == changed
    press(page, "Edit")
    page.keyboard.type("late")
    client.got("/whale/replace", "POST", {"start": 0, "end": 4, "text": "Never"})
    press(page, "Done")
    page.get_by_text("whale was changed by another").wait_for()
    assert page.get_by_label("Your text, to copy").input_value() == "late"
    press(page, "Close")
    now = client.got("/whale")["text"]
    assert now == "Never" + changed[4:]
    assert page.evaluate(STORY) == now
