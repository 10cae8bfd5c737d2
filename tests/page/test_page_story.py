"""Stories on the page: writing on, cutting, undoing, and long texts that stay quick."""

from __future__ import annotations

import re
from typing import Any

from browser import until
from needed import needed

story_text = needed("fake_sessions", name="the server's packages").story_text

WIDE = {"viewport": {"width": 1400, "height": 800}}
IDLE = "body:not(.making)"


def text_of(page: Any) -> str:
    text: str = page.evaluate("document.querySelector('.page-text').textContent")
    return text


def whole(fake: Any, name: str) -> str:
    text: str = fake.sessions[name].text
    return text


def write_on(page: Any) -> None:
    page.get_by_role("button", name=re.compile("^Write")).click()
    page.locator(IDLE).wait_for()
    page.get_by_role("button", name="Undo passage").wait_for()


def test_a_story_is_begun_continued_and_taken_back(tab: Any, fake: Any) -> None:
    page = tab().page
    page.get_by_label("More").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("You are a sailor.")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("link", name="New story").click()
    page.get_by_label("Beginning of the story").fill("Once 🐋 upon a time,")
    write_on(page)
    page.get_by_role("heading", name="chat-1").wait_for()
    until(page, "document.querySelector('.page-text').textContent.includes('passage 4')")
    assert text_of(page) == whole(fake, "chat-1")
    once = text_of(page)
    page.locator(IDLE).wait_for()
    write_on(page)
    until(page, "document.querySelector('.page-text').textContent.split('passage 4').length === 3")
    assert text_of(page) == whole(fake, "chat-1") != once
    page.get_by_role("button", name="Undo passage").click()
    until(page, "document.querySelector('.page-text').textContent.split('passage 4').length === 2")
    assert text_of(page) == once


def test_a_story_goes_on_from_the_cursor(tab: Any, fake: Any) -> None:
    """Characters are counted as the server does, also behind a whale."""
    beginning = "A 🐋 swims. " * 5 + "And then it sleeps."
    fake.add("whale", kind="story", text=beginning)
    page = tab("#/s/whale").page
    page.locator(".chunk").wait_for()
    page.locator(".scroller").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Write on from the cursor").wait_for()
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelector('.page-text').textContent.includes('passage 4')")
    page.locator(IDLE).wait_for()
    kept = whole(fake, "whale").partition(" passage 0")[0]
    assert text_of(page) == whole(fake, "whale")
    assert beginning.startswith(kept)
    assert kept.rstrip().endswith("And then")


def test_much_text_is_cut_only_after_asking(tab: Any, fake: Any) -> None:
    text = "".join(story_text(1000))
    fake.add("long", kind="story", text=text)
    page = tab("#/s/long").page
    page.locator(".chunk").first.click(position={"x": 100, "y": 100})
    page.get_by_role("button", name="Write on from the cursor").click()
    page.get_by_role("heading", name="Cut the rest?").wait_for()
    page.keyboard.press("Escape")
    assert whole(fake, "long") == text
    page.get_by_role("button", name="Write on from the cursor").click()
    page.get_by_role("button", name="Cut and write on").click()
    until(page, "document.querySelector('.page-text').textContent.includes('passage 4')")
    assert len(whole(fake, "long")) < len(text)


def test_a_passage_can_be_stopped(tab: Any, fake: Any) -> None:
    fake.add("slow", kind="story", text="a slow story")
    page = tab("#/s/slow").page
    page.get_by_role("button", name="Write on").click()
    until(page, "document.querySelector('.page-text').textContent.includes('passage 1')")
    page.keyboard.press("Escape")
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(100)
    assert text_of(page) == whole(fake, "slow")
    assert whole(fake, "slow").count("passage 4") < 20


def test_the_strip_leads_to_each_place_of_a_long_story(tab: Any, fake: Any) -> None:
    session = fake.add("long", kind="story", text="".join(story_text(50_000)))
    page = tab("#/s/long", **WIDE).page
    page.get_by_text("Of 50,000 tokens").wait_for()
    page.get_by_role("button", name="Shade the text").click()
    strip = page.get_by_role("slider", name="Place in the text")
    strip.focus()
    strip.press("Home")
    page.locator('[data-p="0"]').wait_for()
    box = strip.bounding_box()
    strip.click(position={"x": 1, "y": box["height"] / 2})
    until(page, "[...document.querySelectorAll('[data-p]')].some((each) => each.dataset.p > 20000)")
    shown = page.locator("[data-p]").evaluate_all(
        "(all) => all.slice(50, 150).map((each) => [Number(each.dataset.p), each.textContent])"
    )
    assert [text for _, text in shown] == [session.tokens()[position] for position, _ in shown]
    assert page.locator("[data-p]").count() < 10_000
