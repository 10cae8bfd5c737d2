"""Text that tries to be more than text, and text of a size that nobody reads."""

from __future__ import annotations

import re
from typing import Any

import pytest

from browser import answers, say

HOSTILE = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
    "<iframe src='https://elsewhere.example/'></iframe><svg onload='window.harmed = 1'>",
    "[a](javascript:window.harmed=1) [b](data:text/html,<script>1</script>) ![c](https://elsewhere.example/c.png)",
    "```<b>\n</code></pre><script>window.harmed = 1</script>\n```",
    "| <b>a</b> | <script>1</script> |\n|---|---|\n| <i>b</i> | <style>*{display:none}</style> |",
    "\u202eright to left\u2066 and \u200f back",
    "**" * 3000 + "[" * 3000 + "`" * 3000 + "> " * 3000 + "- " * 3000,
)
FOREIGN = "script, img, iframe, svg, style, b, i, object, embed, form, input, video, audio, link"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_part_of_the_page(tab: Any, fake: Any, text: str) -> None:
    page = tab().page
    say(page, f"echo {text}")
    assert page.locator(".turn").locator(FOREIGN).count() == 0
    assert page.evaluate("window.harmed") is None
    for link in page.locator(".turn a").all():
        assert link.get_attribute("href").startswith("https://")
        assert link.get_attribute("rel") == "noopener noreferrer"
    fake.add("<img src=x onerror=alert(1)>", kind="story", text=text)
    page.get_by_label("Search chats and stories").fill("<img")
    page.get_by_role("link", name=re.compile("^<img src=x")).click()
    page.locator(".chunk").first.wait_for()
    assert page.locator(".chunk, #sessions, .top").locator("img, script, iframe").count() == 0


def test_right_to_left_text_stays_in_its_place(tab: Any) -> None:
    page = tab().page
    say(page, "echo שלום עולם")
    said = page.locator(".said")
    assert said.get_attribute("dir") == "auto"
    assert page.evaluate("getComputedStyle(document.querySelector('.answer p')).direction") == "rtl"
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.answer')).unicodeBidi")
        == "isolate"
    )


def test_ten_megabytes_in_one_line(tab: Any, fake: Any) -> None:
    size = 10_000_000
    session = fake.add("huge")
    session.turns.append(
        {"user": "more", "answer": "a*b*" * (size // 4), "finish": "stop", "attempt": 0}
    )
    session.touch()
    page = tab("#/s/huge").page
    page.locator(".turn").wait_for()
    assert len(page.locator(".answer").text_content()) == size
    page.get_by_label("Message", exact=True).fill("still alive")
    fake.add("line", kind="story", text="x" * size)
    page.goto(f"{fake.address}/#/s/line")
    page.locator(".chunk").first.wait_for()
    assert page.evaluate("document.querySelector('.page-text').textContent.length") == size


def test_an_answer_is_the_same_streamed_and_loaded(tab: Any) -> None:
    """Streaming makes only the last block again."""
    text = (
        "# Title\n\nA *paragraph* with `code`\nand **more** https://elsewhere.example/a_b_c.\n\n"
        "1. one\n2. two\n   - in\n   - side\n\n> quoted\n> text\n\n```py\na\n\nb\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n---\nend\\* snake_case_word ~~gone~~"
    )
    page = tab().page
    say(page, f"echo {text}")
    streamed = page.locator(".answer").inner_html()
    page.reload()
    page.locator(".answer hr").wait_for()
    assert page.locator(".answer").inner_html() == streamed
    assert [
        len(page.locator(f".answer {tag}").all())
        for tag in ("h3", "ol li", "ul li", "blockquote", "pre", "td", "em", "strong", "del")
    ] == [1, 4, 2, 1, 1, 2, 1, 1, 1]
    assert "snake_case_word" in answers(page)[0]
