"""The memory map beside a chat: the strip, the shaded text, pins, what was recalled, and files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from browser import axe_source, say, serious_findings, until
from needed import needed

sessions = needed("fake_sessions", name="the server's packages")
PAIRS, story_text = sessions.PAIRS, sessions.story_text

WIDE = {"viewport": {"width": 1400, "height": 800}}


def colours(page: Any) -> set[str]:
    """The colours of the strip, some pixels from its left."""
    found: list[str] = page.evaluate(
        """() => {
          const canvas = document.querySelector(".strip canvas");
          const { data } = canvas.getContext("2d").getImageData(2, 0, 1, canvas.height);
          const colours = new Set();
          for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3]) colours.add([...data.slice(i, i + 3)].join());
          }
          return [...colours];
        }"""
    )
    return set(found)


def test_the_strip_shows_what_is_kept(tab: Any, fake: Any) -> None:
    fake.add("long", kind="story", text="".join(story_text(2000)))
    page = tab("#/s/long", **WIDE).page
    page.get_by_text("Of 2,000 tokens the cache holds").wait_for()
    summary = page.locator("#memory .summary").inner_text()
    kept = fake.sessions["long"].map(None, None)["kept"]["positions"]
    assert f"holds {len(kept)} (" in summary
    assert "4 pinned" in summary
    assert "256 recent" in summary
    assert f"{2000 - len(kept):,} only in the archive" in summary
    assert {"230,159,0", "86,180,233"} <= colours(page)


def test_what_is_not_read_yet_is_not_forgotten(tab: Any, fake: Any) -> None:
    fake.add("long", kind="story", text="".join(story_text(2000)))
    fake.sessions["long"].read = 500
    page = tab("#/s/long", **WIDE).page
    page.get_by_text("1,500 tokens still to be read.").wait_for()
    summary = page.locator("#memory .summary").inner_text()
    assert summary.startswith("Of 500 tokens the cache holds")
    assert "recent" in summary
    fake.sessions["long"].read = 0
    page.reload()
    page.get_by_text("2,000 tokens still to be read.").wait_for()


def test_figures_are_shown_and_kept_up_to_date(tab: Any, fake: Any) -> None:
    page = tab(**WIDE).page
    say(page, "hello")
    figures = page.locator(".numbers")
    figures.get_by_text("98.7 tokens/s").wait_for()
    figures.get_by_text("after 0.12 s").wait_for()
    for message in ("hello again", "and more"):
        say(page, message)
        n = len(fake.sessions["chat-1"].tokens())
        figures.get_by_text(f"{n} tokens", exact=True).wait_for()


def test_shaded_text_is_the_text_and_tells_of_each_token(tab: Any, fake: Any) -> None:
    page = tab(**WIDE).page
    say(page, "please remember the sea")
    page.get_by_role("button", name="Shade the text").click()
    token = page.locator(".answer [data-p]").first
    token.wait_for()
    answer = fake.sessions["chat-1"].turns[0]["answer"]
    assert page.locator(".answer").text_content() == answer
    token.hover()
    tip = page.get_by_role("tooltip")
    tip.get_by_text(f"Held by {PAIRS} of {PAIRS} pairs").wait_for()
    page.locator(".scroller").focus()
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.dataset.p")
    tip.get_by_text(f"Token {focused}:").wait_for()
    page.keyboard.press("p")
    page.locator(f'[data-p="{focused}"].pinned').wait_for()
    assert [int(focused), int(focused) + 1] in fake.sessions["chat-1"].pinned
    page.get_by_role("button", name="Shade the text").click()
    page.locator(".answer li").first.wait_for()


def test_text_is_shaded_where_another_map_comes_first(tab: Any) -> None:
    page = tab(**WIDE).page
    say(page, "hello")
    held: list[Any] = []
    page.route("**/tokens?*", lambda route: held.append(route))
    page.get_by_role("button", name="Shade the text").click()
    while not held:
        page.wait_for_timeout(20)
    toggle = page.get_by_role("button", name="Memory", exact=True)
    toggle.click()
    with page.expect_response("**/map"):
        toggle.click()
    page.wait_for_timeout(200)
    for route in held:
        route.continue_()
    page.locator(".answer [data-p]").first.wait_for()


def test_an_earlier_answer_is_shaded_in_its_turn(tab: Any) -> None:
    page = tab(**WIDE).page
    say(page, "hello")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2 of 2").wait_for()
    page.get_by_role("button", name="Shade the text").click()
    page.locator(".answer [data-p]").first.wait_for()
    page.get_by_role("button", name="Earlier answer").click()
    page.get_by_role("group", name="Answers").filter(has_text="1 of 2").wait_for()
    page.locator(".answer [data-p]").first.wait_for()
    assert page.locator(".answer").inner_text().startswith("Answer 1 to")


def test_selected_text_is_pinned_and_unpinned(tab: Any, fake: Any) -> None:
    page = tab(**WIDE).page
    say(page, "hello whale")
    pinned = list(fake.sessions["chat-1"].pinned)
    page.locator(".said").select_text()
    page.get_by_role("button", name="Pin", exact=True).click()
    page.locator(".pin-bar").wait_for(state="hidden")
    until(page, "document.querySelector('#live').textContent === 'Pinned'")
    assert len(fake.sessions["chat-1"].pinned) == len(pinned) + 1
    page.locator(".said").select_text()
    page.get_by_role("button", name="Unpin").click()
    until(page, "document.querySelector('#live').textContent === 'Unpinned'")
    assert fake.sessions["chat-1"].pinned == pinned


def test_the_place_that_is_selected_is_pinned(tab: Any, fake: Any) -> None:
    """Not the last one with these words; and the marks of Markdown are not shown."""
    page = tab(**WIDE).page
    say(page, "echo One **white** whale and a *white* whale swim, and a white whale sings.")
    page.evaluate(
        """() => {
          const [bold, slanted] = document.querySelectorAll(".answer strong, .answer em");
          getSelection().setBaseAndExtent(slanted.firstChild, 0, slanted.nextSibling, 6);
        }"""
    )
    page.get_by_role("button", name="Pin", exact=True).click()
    until(page, "document.querySelector('#live').textContent === 'Pinned'")
    session = fake.sessions["chat-1"]
    start, end = session.pinned[-1]
    assert session.tokens()[start:end] == [" *white*", " whale"]


def test_a_picture_is_pinned_where_it_is_selected(tab: Any, fake: Any) -> None:
    page = tab(**WIDE).page
    say(page, "echo The *whale* sees 🐋 and then 🐋 again.")
    page.evaluate(
        """() => {
          const text = document.querySelector(".answer em").nextSibling;
          const at = text.data.indexOf("🐋");
          getSelection().setBaseAndExtent(text, at, text, at + 2);
        }"""
    )
    page.get_by_role("button", name="Pin", exact=True).click()
    until(page, "document.querySelector('#live').textContent === 'Pinned'")
    session = fake.sessions["chat-1"]
    start, end = session.pinned[-1]
    assert session.tokens()[start - 1 : end + 1] == [" sees", " 🐋", " and"]


def test_what_was_recalled_leads_to_its_place(tab: Any) -> None:
    page = tab(**WIDE).page
    for n in range(12):
        say(page, f"message {n}")
    say(page, "remember this")
    recalled = page.locator(".recalled-list button")
    recalled.wait_for()
    page.get_by_text("looked at with 0.25").wait_for()
    recalled.click()
    until(page, "document.querySelector('.scroller').scrollTop < 50")


def test_what_was_recalled_is_there_when_the_chat_is_opened_again(tab: Any) -> None:
    page = tab(**WIDE).page
    for n in range(12):
        say(page, f"message {n}")
    say(page, "remember this")
    page.locator(".recalled-list button").wait_for()
    page.reload()
    page.get_by_text("looked at with 0.25").wait_for()


def test_one_layer_and_head_can_be_seen_and_saved(tab: Any, tmp_path: Path) -> None:
    page = tab(**WIDE).page
    say(page, "hello")
    page.get_by_role("button", name="Layers and heads").click()
    page.get_by_text(re.compile("Layer 0, head 0: [0-9]+ of")).wait_for()
    page.get_by_role("button", name="Layer 0, head 0").focus()
    page.keyboard.press("ArrowDown")
    page.get_by_text(re.compile("Layer 1, head 0: [0-9]+ of")).wait_for()
    dialog = page.locator("dialog")
    for form, begin in (("PNG", b"\x89PNG"), ("SVG", b"<svg xmlns")):
        with page.expect_download() as download:
            dialog.get_by_role("button", name=f"Save as {form}").click()
        download.value.save_as(tmp_path / form)
        assert (tmp_path / form).read_bytes().startswith(begin)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(tab: Any, fake: Any, scheme: str) -> None:
    axe = axe_source()
    fake.add("long", kind="story", text="".join(story_text(2000)))
    page = tab(color_scheme=scheme, **WIDE).page

    def check(where: str) -> None:
        assert serious_findings(page, axe) == [], where

    check("a new chat")
    say(page, "echo # Title\n\n`code` and [link](https://a.example)\n\n```\ncode\n```\n\n> quote")
    say(page, "remember the sea")
    check("a chat")
    page.get_by_role("button", name="Shade the text").click()
    page.locator("[data-p]").first.wait_for()
    check("shaded text")
    page.goto(f"{fake.address}/#/s/long")
    page.locator(".chunk").first.wait_for()
    check("a story")
    page.get_by_role("button", name="Shade the text").click()
    page.locator(".chunk [data-p]").first.wait_for()
    check("a shaded story")
    page.get_by_label("More").click()
    page.get_by_role("button", name="Settings").click()
    check("settings")


def test_another_answer_of_as_many_tokens_is_shaded_as_it_is(tab: Any, fake: Any) -> None:
    page = tab(**WIDE).page
    say(page, "hello")
    page.get_by_role("button", name="Shade the text").click()
    page.locator(".answer [data-p]").first.wait_for()
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2 of 2").wait_for()
    page.locator(".answer [data-p]").first.wait_for()
    answer = fake.sessions["chat-1"].turns[0]["answer"]
    assert answer.startswith("Answer 2 to")
    until(page, "document.querySelector('.answer').textContent.startsWith('Answer 2 to')")
    assert page.locator(".answer").text_content() == answer


def test_text_is_pinned_that_came_since_the_memory_was_hidden(tab: Any, fake: Any) -> None:
    fake.add("tale", kind="story", text="".join(story_text(300)))
    page = tab("#/s/tale", **WIDE).page
    page.get_by_text("Of 300 tokens the cache holds").wait_for()
    page.keyboard.press("Control+m")
    page.get_by_role("button", name="Write on").click()
    until(page, "document.querySelector('.page-text').textContent.includes('passage 4')")
    page.locator("body:not(.making)").wait_for()
    page.wait_for_timeout(200)
    page.evaluate(
        """() => {
          const { firstChild: text } = [...document.querySelectorAll(".chunk")].at(-1);
          const at = text.data.indexOf("passage 3");
          getSelection().setBaseAndExtent(text, at, text, at + "passage 3".length);
        }"""
    )
    page.get_by_role("button", name="Pin", exact=True).click()
    until(page, "document.querySelector('#live').textContent === 'Pinned'")
    session = fake.sessions["tale"]
    start, end = session.pinned[-1]
    assert session.tokens()[start:end] == [" passage", " 3"]


@pytest.mark.parametrize("again", [False, True])
def test_a_message_stays_in_sight_while_it_is_answered(tab: Any, fake: Any, again: bool) -> None:
    """Its tokens are not known yet, or are those of the answer before."""
    page = tab(**WIDE).page
    say(page, "slowly hello")
    page.get_by_role("button", name="Shade the text").click()
    page.locator(".answer [data-p]").first.wait_for()
    if again:
        page.get_by_role("button", name="Regenerate").click()
    else:
        box = page.get_by_label("Message", exact=True)
        box.fill("slowly hello")
        box.press("Enter")
    shown = "document.querySelector('.turn:last-child .answer').textContent"
    with page.expect_response("**/map"):
        until(page, f"{shown}.includes('word 60')")
    page.wait_for_timeout(300)
    assert "slowly hello" in page.locator(".said").last.text_content()
    assert page.evaluate(shown).startswith("word 0. word 1.")
    page.get_by_role("button", name="Stop").click()
    page.locator("body:not(.making)").wait_for()
    page.locator(".turn:last-child .answer [data-p]").first.wait_for()
    assert page.locator(".said").last.text_content() == "<user>slowly hello\n<assistant>"
