"""The memory panel: the strip, shaded text, pins, recalled passages."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from browser import (
    IDLE,
    LIVE,
    STORY,
    WIDE,
    ask,
    axe_source,
    choose,
    name_of,
    open_session,
    press,
    serious_findings,
    set_max_tokens,
    start_long_answer,
    stop_answer,
    until,
)

# A visible token; tokens that are part of a character have no text.
TOKEN = ":is(.answer, .chunk) [data-p]:not(:empty)"


def colours(page: Any) -> set[str]:
    """Return the colours in a column of the strip."""
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


def shade(page: Any) -> None:
    press(page, "Shade the text")
    page.locator(TOKEN).first.wait_for(state="attached")


def texts_of(client: Any, name: str, start: int, end: int) -> list[str]:
    texts: list[str] = client.got(f"/{name}/tokens?start={start}&end={end}")["texts"]
    return texts


def answer_tokens(client: Any, name: str) -> str:
    """Return the text of the last answer's tokens."""
    turn = client.got(f"/{name}")["turns_list"][-1]
    return "".join(texts_of(client, name, turn["answer_start"], turn["end"]))


def pin_selection(page: Any, client: Any, name: str) -> tuple[int, int]:
    """Pin the selection and return the newly pinned span."""
    before = client.got(f"/{name}/map")["pinned"]
    press(page, "Pin")
    until(page, f"{LIVE} === 'Pinned'")
    [span] = [span for span in client.got(f"/{name}/map")["pinned"] if span not in before]
    return span[0], span[1]


def expect_in_legend(page: Any, label: str, n: int) -> None:
    """Wait until the legend shows `n` tokens in a state."""
    entry = page.locator(".legend li").filter(has_text=label)
    entry.get_by_text(f"{n:,}", exact=True).wait_for()


# ---------------------------------------------------------------------------------------------
# The map
# ---------------------------------------------------------------------------------------------


def test_the_memory_opens_at_the_first_eviction_unless_it_was_closed(tab: Any) -> None:
    one = tab(**WIDE)
    one.context.add_init_script("localStorage.removeItem('pyh2o-memory')")
    page = one.page
    page.reload()
    ask(page, "hello")
    assert not page.locator("#memory").is_visible()
    set_max_tokens(page, 250)
    ask(page, "and more than the cache can hold")
    page.get_by_text(re.compile("are in the cache; the rest is in the archive")).wait_for()
    press(page, "Close the memory")
    ask(page, "again")
    assert not page.locator("#memory").is_visible()


def test_the_strip_shows_the_cache_and_unread_tokens(tab: Any, client: Any) -> None:
    client.story("tale", "once upon a time " * 60)
    page = tab(client.address("tale"), **WIDE).page
    n = client.got("/tale")["tokens"]
    page.get_by_text(f"{n:,} tokens not read yet.").wait_for()
    page.get_by_label("Tokens per passage").fill("3")
    press(page, "Continue")
    page.get_by_text(re.compile("are in the cache; the rest is in the archive")).wait_for()
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(500)
    found = client.got("/tale/map")
    kv = found["kv"]
    summary = page.locator("#memory .summary").inner_text()
    assert summary.startswith(f"{kv['used']} of {kv['position']:,} tokens are in the cache;")
    expect_in_legend(page, "Recalled", sum(end - start for start, end in found["recalled"]))
    assert {"204,121,167", "86,180,233"} <= colours(page)


def test_a_recalled_passage_links_to_its_message(tab: Any, client: Any) -> None:
    """The list is the same after a reload."""
    page = tab(**WIDE).page
    for n in range(12):
        ask(page, f"message {n}, and some more words to be evicted soon")
    name = name_of(page)
    recalled = page.locator(".recalled-list button")
    texts = [each["text"].strip()[:160] for each in client.got(f"/{name}/recalled")]
    shown = (
        "[...document.querySelectorAll('.recalled-list button')].map((each) => each.textContent)"
    )
    assert texts
    for _ in range(2):
        until(page, f"JSON.stringify({shown}) === JSON.stringify({json.dumps(texts)})")
        page.get_by_text("weight").first.wait_for()
        page.reload()
    recalled.first.click()
    page.locator(".turn.highlighted").wait_for()


def test_the_map_of_one_layer_and_head_is_shown(tab: Any) -> None:
    page = tab(**WIDE).page
    ask(page, "hello")
    page.get_by_text("Statistics", exact=True).click()
    press(page, "Layers and heads")
    page.get_by_text(re.compile("Layer 0, head 0: [0-9]+ of")).wait_for()
    page.get_by_label("Layer", exact=True).select_option("2")
    page.get_by_label("Head", exact=True).select_option("1")
    page.get_by_text(re.compile("Layer 2, head 1: [0-9]+ of")).wait_for()


# ---------------------------------------------------------------------------------------------
# Shaded text
# ---------------------------------------------------------------------------------------------


def test_shading_keeps_the_text_and_describes_each_token(tab: Any, client: Any) -> None:
    page = tab(**WIDE).page
    ask(page, "please remember the sea")
    plain = page.locator(".answer").text_content()
    shade(page)
    name = name_of(page)
    assert page.locator(".answer").text_content() == plain
    page.locator(TOKEN).first.hover()
    about = page.locator("#memory .token-info")
    about.get_by_text(re.compile(r"Held by \d+ of \d+ pairs")).wait_for()
    page.locator(".scroller").focus()
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.dataset.p")
    about.get_by_text(f"Token {focused}:").wait_for()
    until(page, f"{LIVE}.startsWith('Token {focused}:')")
    page.keyboard.press("p")
    page.locator(f'[data-p="{focused}"].pinned').wait_for()
    pinned = client.got(f"/{name}/map")["pinned"]
    assert any(start <= int(focused) < end for start, end in pinned)
    press(page, "Shade the text")
    until(page, "!document.querySelector('[data-p]')")
    assert page.locator(".answer").text_content() == plain


def test_text_is_shaded_if_a_new_map_arrives_before_the_tokens(tab: Any) -> None:
    page = tab(**WIDE).page
    ask(page, "hello")
    held: list[Any] = []
    page.route("**/tokens?*", lambda route: held.append(route))
    press(page, "Shade the text")
    while not held:
        page.wait_for_timeout(20)
    press(page, "Memory")
    with page.expect_response("**/map"):
        press(page, "Memory")
    page.wait_for_timeout(200)
    for route in held:
        route.continue_()
    page.locator(TOKEN).first.wait_for(state="attached")


def test_another_attempt_is_shaded_with_its_own_tokens(tab: Any, client: Any) -> None:
    """Attempts can have the same number of tokens."""
    page = tab(**WIDE).page
    ask(page, "hello")
    shade(page)
    first = shaded_answer(page, client)
    press(page, "Regenerate")
    page.get_by_text("2 of 2").wait_for()
    page.locator(TOKEN).first.wait_for(state="attached")
    assert shaded_answer(page, client) != first
    press(page, "Previous answer")
    page.get_by_role("group", name="Answers").filter(has_text="1 of 2").wait_for()
    page.locator(TOKEN).first.wait_for(state="attached")
    page.wait_for_timeout(300)
    assert shaded_answer(page, client) == first


def test_shading_keeps_markdown_and_hides_the_chat_template(tab: Any, client: Any) -> None:
    answer = "# Sea\n\nIt is **wide** and *deep*, see [a map](http://127.0.0.1/wide).\n\n"
    answer += "- one\n- `two`\n\n```python\nsea = 'sea'\n```\n\nThe end"
    client.chat("talk", "user: What is the sea?", answer=answer)
    page = tab(client.address("talk"), **WIDE).page
    page.locator(".code-head").get_by_text("Python").wait_for()
    plain = [page.locator(each).inner_text() for each in (".user-message", ".answer")]
    shade(page)
    for element in ("h3", "strong", "em", "a", "li code", "pre code", "p >> text=The end"):
        page.locator(f".answer {element}").first.wait_for()
    assert [page.locator(each).inner_text() for each in (".user-message", ".answer")] == plain
    shaded = shaded_answer(page, client)
    assert "wide and deep, see a map." in shaded
    assert shaded.endswith("The end")


def shaded_answer(page: Any, client: Any) -> str:
    """Return the shaded text of the answer, and check that each span is part of its token."""
    spans = "[...document.querySelectorAll('.answer [data-p]')]"
    shown = page.evaluate(f"{spans}.map((t) => [Number(t.dataset.p), t.textContent])")
    texts = texts_of(client, name_of(page), 0, 10**4)
    assert all(text.strip() in texts[position] for position, text in shown)
    assert [position for position, _ in shown] == sorted(position for position, _ in shown)
    return "".join(text for _, text in shown)


@pytest.mark.parametrize("again", [False, True])
def test_a_shaded_message_stays_during_its_answer(tab: Any, client: Any, again: bool) -> None:
    """Its tokens are unknown, or known only for the previous answer."""
    page = tab(**WIDE).page
    ask(page, "hello")
    shade(page)
    with page.expect_response("**/map"):
        if again:
            page.evaluate("localStorage.setItem('pyh2o-max-tokens', '1000000')")
            press(page, "Regenerate")
        else:
            start_long_answer(page, "hello")
        shown = "document.querySelector('.turn:last-child .answer').textContent"
        until(page, f"{shown}.length > 200")
    page.wait_for_timeout(300)
    assert "hello" in page.locator(".user-message").last.text_content()
    assert page.locator(".turn:last-child .answer [data-p]").count() == 0
    stop_answer(page)
    page.locator(f".turn:last-child {TOKEN}").first.wait_for(state="attached")
    assert page.locator(".user-message").last.text_content() == "hello"


# ---------------------------------------------------------------------------------------------
# Pins
# ---------------------------------------------------------------------------------------------


def test_selected_text_can_be_pinned_and_unpinned(tab: Any, client: Any) -> None:
    page = tab(**WIDE).page
    ask(page, "The word is mellon")
    name = name_of(page)
    before = client.got(f"/{name}/map")["pinned"]
    page.locator(".user-message").select_text()
    span = pin_selection(page, client, name)
    assert "".join(texts_of(client, name, *span)).strip() == "The word is mellon"
    page.locator(".pin-bar").wait_for(state="hidden")
    n_pinned = sum(end - start for start, end in client.got(f"/{name}/map")["pinned"])
    expect_in_legend(page, "Pinned", n_pinned)
    page.locator(".user-message").select_text()
    press(page, "Unpin")
    until(page, f"{LIVE} === 'Unpinned'")
    assert client.got(f"/{name}/map")["pinned"] == before


@pytest.mark.parametrize(
    ("answer", "select", "wanted"),
    [
        (
            "One **white** whale and a *white* whale swim, and a white whale sings.",
            """const em = document.querySelector(".answer em");
               getSelection().setBaseAndExtent(em.firstChild, 0, em.nextSibling, 6);""",
            "white* whale",
        ),
        (
            "The *whale* sees 🐋 and then 🐋 again.",
            """const text = document.querySelector(".answer em").nextSibling;
               const at = text.data.indexOf("🐋");
               getSelection().setBaseAndExtent(text, at, text, at + 2);""",
            "🐋",
        ),
    ],
    ids=["words", "picture"],
)
def test_only_the_selected_occurrence_is_pinned(
    tab: Any, client: Any, answer: str, select: str, wanted: str
) -> None:
    """The text occurs several times, and Markdown syntax is not displayed."""
    client.chat("one", "hello", answer=answer)
    page = tab(client.address("one"), **WIDE).page
    page.locator(".answer em").wait_for()
    page.evaluate(f"() => {{ {select} }}")
    start, end = pin_selection(page, client, "one")
    assert wanted in "".join(texts_of(client, "one", start, end))
    turn = client.got("/one")["turns_list"][-1]
    before = "".join(texts_of(client, "one", turn["answer_start"], start))
    assert before.strip() in answer[: answer.index(wanted)].strip()
    assert "swim" not in before


def test_text_written_while_the_memory_is_hidden_can_be_pinned(tab: Any, client: Any) -> None:
    client.story("tale", "once upon a time " * 20)
    page = tab(client.address("tale"), **WIDE).page
    page.get_by_text("tokens not read yet.").wait_for()
    page.keyboard.press("Control+m")
    page.get_by_label("Tokens per passage").fill("30")
    press(page, "Continue")
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()
    text = client.got("/tale")["text"]
    until(page, f"Array.from({STORY}).length === {len(text)}")
    selected = page.evaluate(
        """() => {
          const { firstChild: text } = [...document.querySelectorAll(".chunk")].at(-1);
          getSelection().setBaseAndExtent(text, text.length - 12, text, text.length);
          return text.data.slice(-12);
        }"""
    )
    span = pin_selection(page, client, "tale")
    assert selected in "".join(texts_of(client, "tale", *span))


# ---------------------------------------------------------------------------------------------
# Accessibility
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(tab: Any, client: Any, scheme: str) -> None:
    axe = axe_source()
    client.story("long", "once upon a time " * 60)
    answer = "# Title\n\n`code` and [link](https://a.example)\n\n```\ncode\n```\n\n> quote"
    coloured = "```py\n# so\nclass A:\n    x: int = f('a', 1)\n```\n\n$x$\n\n$$\n\\frac{1}{2}\n$$"
    file = "hello\n\npoem.txt:\n\n````\nroses\n````"
    client.chat("one", file, answer=f"{answer}\n\n{coloured}")
    page = tab(color_scheme=scheme, **WIDE).page

    def check(where: str) -> None:
        assert serious_findings(page, axe) == [], where

    check("a new chat")
    page.get_by_title("Choose a model").click()
    page.get_by_text("Other models").click()
    check("the models")
    page.get_by_label("Files to add", exact=True).set_input_files(__file__)
    page.get_by_label("Remove test_page_memory.py").wait_for()
    check("a file")
    open_session(page, client, "one")
    page.locator(".answer .hl-keyword").wait_for()
    page.locator(".answer .katex").first.wait_for()
    page.get_by_text("Statistics", exact=True).click()
    page.get_by_text("poem.txt · 1 line").click()
    ask(page, "remember the sea")
    check("a chat")
    shade(page)
    check("shaded text")
    open_session(page, client, "long")
    page.locator(".chunk").first.wait_for()
    check("a story")
    press(page, "Edit")
    check("a story that is edited")
    page.keyboard.press("Escape")
    shade(page)
    check("a shaded story")
    choose(page, "Settings")
    check("settings")
