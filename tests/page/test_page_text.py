"""Text on the page: hostile, formatted, and huge."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from browser import answers, ask, box_of, expect_value, open_session, until

HOSTILE = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
    "<iframe src='https://elsewhere.example/'></iframe><svg onload='window.harmed = 1'>",
    "[a](javascript:window.harmed=1) [b](data:text/html,<script>1</script>) ![c](https://elsewhere.example/c.png)",
    "<details open ontoggle='window.harmed = 1'><summary onclick='window.harmed = 1'>a</summary>"
    "</details> <sub onclick='window.harmed = 1'>b</sub> <a href='https://elsewhere.example/'>c</a>",
    "```<b>\n</code></pre><script>window.harmed = 1</script>\n```",
    "| <b>a</b> | <script>1</script> |\n|---|---|\n| <i>b</i> | <style>*{display:none}</style> |",
    "\u202eright to left\u2066 and \u200f back",
    "**" * 500 + "[" * 500 + "`" * 500 + "> " * 500 + "- " * 500,
)
FOREIGN = "script, img, iframe, svg, style, b, i, object, embed, form, input, video, audio, link"

MARKED = (
    "# Title\n\nA *paragraph* with `code`\nand **more** https://elsewhere.example/a_b_c.\n\n"
    "1. one\n2. two\n   - in\n   - side\n\n> quoted\n> text\n\n```py\na\n\nb\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n$$\nx^2\n- 1\n$$\n\n---\nend\\* snake_case_word ~~gone~~"
)
# Renders a text streamed and at once.
STREAMED = """async (text) => {
  const { Markdown, showMarkdown } = await import("/page/js/markdown.js");
  const [streamed, whole] = [document.createElement("div"), document.createElement("div")];
  const markdown = new Markdown(streamed);
  for (let at = 0; at < text.length; at += 3) {
    markdown.append(text.slice(at, at + 3));
    markdown.show();
  }
  showMarkdown(whole, text);
  return [streamed.innerHTML, whole.innerHTML];
}"""


def test_hostile_text_adds_no_scripts_or_elements(tab: Any, client: Any) -> None:
    client.chat("one", *HOSTILE, answer="\n\n".join(HOSTILE[:-1]))
    client.chat("deep", "hello", answer=HOSTILE[-1])
    client.story("tale", f"<img src=x onerror='window.harmed = 1'> {' '.join(HOSTILE)}")
    page = tab(client.address("one")).page
    for name in ("one", "deep"):
        open_session(page, client, name)
        page.get_by_role("heading", name=name).wait_for()
        page.locator(".turn").first.wait_for()
        assert page.locator(".turn").locator(f"{FOREIGN}, [onclick], [ontoggle]").count() == 0
        for link in page.locator(".turn a").all():
            assert link.get_attribute("href").startswith("https://")
            assert link.get_attribute("rel") == "noopener noreferrer"
    for text in (*HOSTILE, COMMON, "10. a\n\n11. b\n**c**\n"):
        streamed, whole = page.evaluate(STREAMED, text)
        assert streamed == whole
    page.get_by_role("link", name=re.compile("^tale")).click()
    page.locator(".chunk").first.wait_for()
    assert page.locator(".chunk, #sessions, .top").locator("img, script, iframe").count() == 0
    assert page.evaluate("window.harmed") is None


def test_streamed_and_loaded_answers_look_the_same(tab: Any, client: Any) -> None:
    """Streaming renders only the last blocks again."""
    client.chat("one", "hello", answer=MARKED)
    page = tab(client.address("one")).page
    page.locator(".answer hr").wait_for()
    page.locator(".code-head").get_by_text("Python").wait_for()
    page.locator(".katex-html").wait_for()
    streamed, whole = page.evaluate(STREAMED, MARKED)
    assert streamed == whole == page.locator(".answer").inner_html()
    assert [
        len(page.locator(f".answer {tag}").all())
        for tag in ("h3", "ol li", "ul li", "blockquote", "pre", "td", "em", "strong", "del")
    ] == [1, 4, 2, 1, 1, 2, 1, 1, 1]
    assert "snake_case_word" in answers(page)[0]


COMMON = """**bold *both***, ~~gone~~, 3~5-6~8, H<sub>2</sub>O, one<br>two, AT&amp;T, vector<int>

- [x] done
- [ ] open

3. third

| left | middle | right |
|:-----|:------:|------:|
| 1 | 2 | 3 |

<details>
<summary>More</summary>

- hidden

</details>"""


def test_common_markdown_is_rendered(tab: Any, client: Any) -> None:
    """Nested emphasis, task lists, alignment and harmless HTML; unknown tags stay text."""
    client.chat("one", "hello", answer=COMMON)
    page = tab(client.address("one")).page
    page.locator(".answer strong em").get_by_text("both", exact=True).wait_for()
    first = page.locator(".answer > p").first
    assert first.inner_text() == "bold both, gone, 3~5-6~8, H2O, one\ntwo, AT&T, vector<int>"
    assert page.locator(".answer del").all_inner_texts() == ["gone"]
    assert page.locator(".answer > ul > li").all_inner_texts() == ["☑ done", "☐ open"]
    align = "cells => cells.map(cell => getComputedStyle(cell).textAlign)"
    assert page.locator("td").evaluate_all(align) == ["left", "center", "right"]
    assert page.locator(".answer ol").get_attribute("start") == "3"
    details = page.locator(".answer details")
    assert not details.locator("li").is_visible()
    details.get_by_text("More", exact=True).click()
    assert details.locator("li").inner_text() == "hidden"


WIDE_BLOCKS = (
    f"| {' | '.join(['Name', 'Description'] * 4)} |\n{'|---' * 8}|\n{'| value ' * 8}|\n\n"
    f"In a sentence $\\sqrt{{{'a_1 + ' * 40}b}}$ too.\n\n1. In a list $\\sqrt{{{'a_1 + ' * 40}b}}$."
)


def test_wide_tables_and_formulas_scroll_on_a_phone(tab: Any, client: Any) -> None:
    """Words in cells are not broken."""
    client.chat("one", "hello", answer=WIDE_BLOCKS)
    page = tab(client.address("one"), viewport={"width": 390, "height": 800}).page
    page.locator(".katex-html").last.wait_for()
    for place in (".table", ".answer > p", ".answer > ol"):
        box = f"document.querySelector('{place}')"
        until(page, f"{box}.scrollWidth > {box}.clientWidth")
        assert page.evaluate(f"getComputedStyle({box}).overflowX") == "auto"
    heights = page.locator("th").evaluate_all("cells => cells.map(cell => cell.offsetHeight)")
    assert max(heights) < 45, "a word is broken into lines"
    assert page.evaluate("document.querySelector('.scroller').scrollWidth <= innerWidth")


def test_code_is_highlighted_and_its_language_named(tab: Any, client: Any) -> None:
    """Unknown languages stay plain, and the text does not change."""
    source = 'def f(x: int) -> str:  # <b>\n    return "a" if x else f"{x}"'
    answer = f"```py\n{source}\n```\n\n```klingon\n{source}\n```"
    client.chat("one", "hello", answer=answer)
    page = tab(client.address("one")).page
    page.locator(".hl-keyword").first.wait_for()
    assert page.locator(".code-head span").all_inner_texts() == ["Python", "klingon"]
    assert page.locator("pre").all_text_contents() == [source, source]
    assert set(page.locator(".hl-keyword").all_inner_texts()) == {"def", "return", "if", "else"}
    assert page.locator(".hl-comment").inner_text() == "# <b>"


def test_formulas_are_rendered_and_prices_are_not(tab: Any, client: Any) -> None:
    r"""Formulas in `\(`, `\[` and dollars; invalid ones show their source."""
    formulas = r"$e^{i\pi}$ and \(a_1\): \[ \frac{1}{2} \]"
    answer = f"{formulas}\n\n$$\nx\n$$.\n\n$5 or $10, $5 and 3$, $HOME/$USER, \\$1\n\n$\\frac{{$"
    client.chat("one", "hello", answer=rf"{answer} $\href{{javascript:window.harmed=1}}{{x}}$")
    page = tab(client.address("one")).page
    page.locator(".math code").wait_for()
    texts = page.locator(".katex annotation").all_text_contents()
    assert texts[:4] == [r"e^{i\pi}", "a_1", r"\frac{1}{2}", "x"]
    assert page.locator(".math code").inner_text() == "\\frac{"
    page.get_by_text("$5 or $10, $5 and 3$, $HOME/$USER, $1", exact=True).wait_for()
    assert page.locator(".answer a").count() == 0
    assert page.locator(".formula .katex-display").count() == 1


def test_reasoning_is_folded_and_tool_calls_are_shown(tab: Any, client: Any) -> None:
    """The reasoning of a streamed answer shows its duration."""
    client.chat("one", "hello")
    page = tab(client.address("one")).page
    page.locator(".turn").wait_for()
    assert page.locator(".reasoning:visible, .tool-call").count() == 0
    call = {"name": "look_up", "arguments": '{"what":"<b>"}'}
    texts = {"user": "why?", "answer": "Because.", "reasoning": "I *wonder* why."}
    turn = {**client.got("/one")["turns_list"][0], **texts}
    session = client.got("/one")
    session["turns_list"].append({**turn, "calls": [call]})
    events = [
        {"type": "reasoning", "text": "I *wonder*"},
        {"type": "reasoning", "text": " why."},
        {"type": "text", "text": "Because."},
        {"type": "done", "turn": turn, "finish": "stop", "kv": None, "tokens_per_second": 21.23},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.route(
        f"**{client.path('/one/answers')}",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    page.route(f"**{client.path('/one')}", lambda route: route.fulfill(json=session))
    ask(page, "why?")
    summary = page.get_by_text("Reasoned for 1 second", exact=True)
    summary.wait_for()
    reasoning = page.locator(".reasoning .md").last
    assert not reasoning.is_visible()
    summary.click()
    assert reasoning.inner_text() == "I wonder why."
    assert page.locator(".turn:last-child .answer").inner_text() == "Because."
    shown = page.get_by_role("group", name="Call of look_up").locator("pre").inner_text()
    assert shown == '{\n  "what": "<b>"\n}'


def test_earlier_steps_are_shown_before_the_answer(tab: Any, client: Any) -> None:
    """Steps have reasoning, text and calls. Answers with <think> in their text are unchanged."""
    answer = "<think>\nI wonder.\n</think>\n\nYes."
    client.chat("one", "hello", answer=answer)
    session = client.got("/one")
    call = {"name": "look_up", "arguments": "{}", "result": "found <it>"}
    step = {"text": "I *look*.", "calls": [call], "reasoning": "Where?"}
    turn = {"answer": "There.", "steps": [step], "reasoning": "Ah.", "finish": "tool_calls"}
    session["turns_list"].append({**session["turns_list"][0], "user": "where?", **turn})
    page = tab(client.address("one")).page
    page.route(f"**{client.path('/one')}", lambda route: route.fulfill(json=session))
    page.reload()
    shown = page.locator(".turn").nth(1)
    shown.get_by_text("Reasoning", exact=True).click()
    shown.get_by_text("Waiting for the results").wait_for()
    texts = [line for line in shown.inner_text().split("\n") if line]
    assert [*texts[texts.index("Reasoning") :]][:7] == [
        *("Reasoning", "Where?", "Ah.", "I look.", "look_up", "{}", "found <it>")
    ]
    assert "There." in texts
    assert "".join(answers(page)[0].split()) == "".join(answer.split())


def test_right_to_left_text_is_isolated(tab: Any, client: Any) -> None:
    client.chat("one", "שלום עולם", answer="שלום עולם")
    page = tab(client.address("one")).page
    assert page.locator(".user-message").get_attribute("dir") == "auto"
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert page.evaluate(style.format(".answer p", "direction")) == "rtl"
    assert page.evaluate(style.format(".answer", "unicodeBidi")) == "isolate"


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_the_page_shows_ten_megabytes_in_one_line(tab: Any, client: Any, kind: str) -> None:
    """The server's response is faked, because a model would need hours for this text."""
    size = 10_000_000
    client.chat("huge", "more")
    huge = client.got("/huge")
    huge["turns_list"][0]["answer"] = "a*b*" * (size // 4)
    if kind == "story":
        huge = {**huge, "kind": "story", "text": "x" * size, "passages": []}
    one = tab()
    one.context.route(f"**{client.path('/huge')}", lambda route: route.fulfill(json=huge))
    page = one.page
    open_session(page, client, "huge")
    page.locator(".answer, .chunk").first.wait_for()
    place = ".answer" if kind == "conversation" else ".story-text"
    assert page.evaluate(f"document.querySelector('{place}').textContent.length") == size
    if kind == "conversation":
        box_of(page).fill("still alive")


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_the_whole_text_is_printed(tab: Any, client: Any, kind: str) -> None:
    long = " ".join(f"word {n}" for n in range(4000))
    if kind == "story":
        client.story("long", long)
    else:
        client.chat("long", *(f"message {n}" for n in range(30)), answer=long[:2000])
    page = tab(client.address("long")).page
    page.locator(".turn, .chunk").last.wait_for(state="attached")
    sheets = re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))
    assert len(sheets) > 8


def test_an_answer_can_be_copied_over_plain_http(tab: Any, client: Any) -> None:
    """Browsers offer no clipboard to pages loaded over HTTP from another machine."""
    client.chat("one", "hello", answer="first\n\n```\nsecond\n```")
    one = tab(client.address("one"))
    one.context.add_init_script("delete Navigator.prototype.clipboard")
    page = one.page
    page.reload()
    for place, copied in ((".code", "second"), (".footer", "first\n\n```\nsecond\n```")):
        page.locator(place).get_by_role("button", name="Copy").click()
        page.locator(place).get_by_text("Copied").wait_for()
        box_of(page).fill("")
        box_of(page).press("Control+v")
        expect_value(box_of(page), copied)
