"""Quick hands, other tabs, broken servers, and what the page keeps of what is not answered yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import browser as browsers
from browser import (
    IDLE,
    STORY,
    answers,
    begin_long_answer,
    box_of,
    choose,
    edit_last,
    name_of,
    press,
    said,
    say,
    send,
    set_max_tokens,
    shows,
    stop_answer,
    until,
)

ENDLESS = {"message": "a long answer", "max_tokens": 10**6}
LONG = "once upon a time " * 10_000
STORY_OF_FIVE = "One two three four five."


@contextmanager
def held(page: Any, place: str, method: str) -> Iterator[None]:
    """While a request waits; the next lines run when it does, and it goes on at the end."""
    waiting: list[Any] = []

    def on_request(route: Any) -> None:
        if route.request.method == method:
            waiting.append(route)
        else:
            route.continue_()

    page.route(place, on_request)
    try:
        yield
        for _ in range(200):
            if waiting:
                break
            page.wait_for_timeout(20)
        assert waiting
    finally:
        for route in waiting:
            route.continue_()
        page.unroute(place, on_request)


def look_away(page: Any) -> None:
    """The page looks every few seconds whether a session has changed: it is not to see it."""
    page.route("**/v1/sessions", lambda route: route.abort())


# ---------------------------------------------------------------------------------------------
# Quick hands
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["Delete", "Rename", "Settings"])
def test_a_question_is_about_the_session_that_it_was_asked_for(
    tab: Any, client: Any, what: str
) -> None:
    """Also where somebody goes back in the browser's history before answering it."""
    client.chat("one", "first")
    client.chat("two", "second")
    page = tab("#/s/one").page
    page.get_by_role("heading", name="one").wait_for()
    page.evaluate("location.hash = '#/s/two'")
    page.get_by_role("heading", name="two").wait_for()
    choose(page, what)
    page.go_back()
    page.locator("#title").get_by_text("one").wait_for()
    dialog = page.locator("dialog")
    if what == "Rename":
        dialog.get_by_role("textbox", name="Name").fill("three")
    if what == "Settings":
        dialog.get_by_label("Temperature").fill("0.25")
    dialog.locator("button[type=submit]").click()
    page.wait_for_timeout(300)
    names = {"Delete": ["one"], "Rename": ["one", "three"], "Settings": ["one", "two"]}
    assert client.names() == names[what]
    assert client.got("/one")["sampling"]["temperature"] != 0.25
    assert page.locator("#title").inner_text() == "one"


def test_a_session_that_comes_late_is_not_shown_over_another(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    page = tab().page
    set_max_tokens(page, 1_000_000)
    box_of(page).fill("and at length")
    with held(page, "**/v1/sessions", "POST"):
        box_of(page).press("Enter")
        page.get_by_role("link", name=re.compile("^one")).click()
        page.locator(".said").get_by_text("first").wait_for()
    until(page, "document.body.classList.contains('making')")
    assert page.locator("#title").inner_text() == "one"
    assert page.url.endswith("#/s/one")
    [name] = [name for name in client.names() if name != "one"]
    page.evaluate(f"location.hash = '#/s/{name}'")
    until(page, "document.querySelector('.answer').textContent.length > 20")
    page.go_back()
    page.keyboard.press("Escape")
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(200)
    assert answers(page) == ["so be it"]


def test_a_chat_and_a_story_are_begun_once(tab: Any, client: Any) -> None:
    page = tab().page
    with held(page, "**/v1/sessions", "POST"):
        send(page, "first")
        send(page, "second")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    page.wait_for_timeout(200)
    shows(box_of(page), "second")
    [name] = client.names()
    assert client.said(name) == ["first"]
    page.get_by_role("link", name="New story").click()
    page.get_by_label("Beginning of the story").fill("Once upon a time,")
    page.get_by_label("Tokens of a passage").fill("5")
    with held(page, "**/v1/sessions", "POST"):
        page.get_by_role("button", name="Write", exact=True).dblclick()
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(200)
    assert len(client.names()) == 2


@pytest.mark.parametrize("kind", ["chat", "story"])
def test_a_double_click_takes_back_once(tab: Any, client: Any, kind: str) -> None:
    if kind == "chat":
        client.chat("one", "first", "second", "third")
    else:
        client.story("one", "Once")
        for _ in range(3):
            client.done("/one/passages", max_tokens=3)
    page = tab("#/s/one").page
    page.get_by_role("button", name="Undo").dblclick()
    until(page, "document.querySelector('#live').textContent.includes('taken back')")
    page.wait_for_timeout(300)
    assert len(client.got("/one")["turns_list" if kind == "chat" else "passages"]) == 2


# ---------------------------------------------------------------------------------------------
# Other tabs
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["Undo", "Edit"])
def test_what_another_tab_has_said_is_not_taken_back_unseen(
    tab: Any, client: Any, what: str
) -> None:
    client.chat("one", "first", "second")
    page = tab("#/s/one").page
    page.get_by_role("button", name=what).wait_for()
    look_away(page)
    client.say("one", "from elsewhere", max_tokens=3)
    if what == "Edit":
        edit_last(page, "second, in other words")
    else:
        press(page, "Undo")
    page.locator(".said").get_by_text("from elsewhere").wait_for()
    page.wait_for_timeout(200)
    assert client.said("one") == said(page) == ["first", "second", "from elsewhere"]
    shows(box_of(page), "second, in other words" if what == "Edit" else "")


def test_an_answer_in_the_making_stays_where_the_session_is_read_again(
    tab: Any, client: Any
) -> None:
    """As of other tabs, which is asked for now and then."""
    client.chat("one", "first")
    page = tab("#/s/one").page
    page.get_by_role("button", name="Undo").wait_for()
    late: list[Any] = []
    page.route("**/sessions/one", lambda route: late.append((route, route.fetch())))
    client.say("one", "second", max_tokens=3)
    while not late:
        page.wait_for_timeout(50)
    begin_long_answer(page)
    for route, response in late:
        route.fulfill(response=response)
    page.unroute_all()
    page.wait_for_timeout(200)
    assert said(page)[-1] == "a long answer"
    shown = "document.querySelector('.turn:last-child .answer').textContent.length"
    until(page, f"{shown} > {page.evaluate(shown)}")
    stop_answer(page)


def test_a_search_keeps_no_open_chat_from_being_renewed(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    page = tab("#/s/one").page
    page.get_by_label("Search chats and stories").fill("nowhere")
    page.get_by_text("Nothing has these words.").wait_for()
    client.say("one", "from elsewhere", max_tokens=3)
    page.locator(".said").get_by_text("from elsewhere").wait_for()


def test_the_cursor_of_a_story_that_was_changed_elsewhere_cuts_nothing(
    tab: Any, client: Any
) -> None:
    client.story("whale", STORY_OF_FIVE)
    page = tab("#/s/whale").page
    put_cursor_before_the_end(page)
    look_away(page)
    text = STORY_OF_FIVE + client.done("/whale/passages", max_tokens=5)["text"]
    page.keyboard.press("Control+Enter")
    page.get_by_text("whale was changed elsewhere").wait_for()
    until(page, f"{STORY}.length > {len(STORY_OF_FIVE)}")
    assert client.got("/whale")["text"] == page.evaluate(STORY) == text


def put_cursor_before_the_end(page: Any) -> None:
    page.locator(".chunk").wait_for()
    page.locator(".scroller").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Write on from the cursor").wait_for()


# ---------------------------------------------------------------------------------------------
# Messages that are refused, or never arrive
# ---------------------------------------------------------------------------------------------


def test_a_draft_survives_a_message_that_comes_back(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    client.chat("two", "second")
    page = tab("#/s/one").page
    box = box_of(page)
    look_away(page)
    with client.answering("/one/answers", **ENDLESS):
        box.fill("refused")
        with held(page, "**/answers", "POST"):
            box.press("Enter")
            until(page, "document.querySelector('textarea').value === ''")
            box.fill("another draft")
        page.get_by_text("session one is being answered").wait_for()
        shows(box, "refused\n\nanother draft")
        box.fill("refused again")
        with held(page, "**/answers", "POST"):
            box.press("Enter")
            page.evaluate("location.hash = '#/s/two'")
            page.locator(".said").get_by_text("second").wait_for()
        page.wait_for_timeout(500)
    page.unroute_all()
    page.evaluate("location.hash = '#/s/one'")
    page.locator(".said").get_by_text("first").wait_for()
    shows(box, "refused again")


def test_a_message_that_is_read_survives_a_reload(tab: Any, client: Any, reading_seen: Any) -> None:
    """The server takes it back when the tab leaves; one that was answered does not come again."""
    page = tab().page
    send(page, LONG)
    page.locator(".chat .reading progress").wait_for()
    box_of(page).fill("what comes next")
    page.reload()
    reading_seen.set()
    shows(box_of(page), f"{LONG.strip()}\n\nwhat comes next")
    begin_long_answer(page)
    name = name_of(page)
    page.reload()
    page.locator(".turn").wait_for()
    shows(box_of(page), "")
    assert client.said(name) == ["a long answer"]


def test_a_message_that_was_taken_back_survives_a_reload(tab: Any, client: Any) -> None:
    client.chat("one", "first", "second")
    page = tab("#/s/one").page
    page.get_by_role("button", name="Undo").wait_for()
    # the answer never comes
    page.route("**/undo", lambda _route: client.got("/one/undo", "POST", {}))
    press(page, "Undo")
    while len(client.said("one")) == 2:
        page.wait_for_timeout(20)
    page.reload()
    page.locator(".said").get_by_text("first").wait_for()
    shows(box_of(page), "second")


def test_a_message_that_has_arrived_after_all_leaves_the_box(tab: Any, client: Any) -> None:
    """A server that ends in the middle of an answer saves it, and cannot say so any more."""
    client.chat("one", "first")
    page = tab("#/s/one").page
    page.get_by_role("button", name="Edit").wait_for()
    page.route("**/answers", lambda route: route.abort())
    page.route("**/sessions/one", lambda route: route.abort())
    send(page, "second")
    page.get_by_text("the server does not answer").wait_for()
    shows(box_of(page), "second")
    page.unroute_all()
    client.say("one", "second", max_tokens=3)
    page.locator(".said").get_by_text("second").wait_for()
    shows(box_of(page), "")


BREAKS_OFF = """
const real = fetch;
window.fetch = async (path, request) => {
  const response = await real(path, request);
  if (!String(path).endsWith("/answers")) return response;
  const reader = response.body.getReader();
  let left = 5;
  const pull = async (to) => {
    const { value } = await reader.read();
    if (left-- > 0) return to.enqueue(value);
    await reader.cancel();
    to.error(new TypeError("network error"));
  };
  return new Response(new ReadableStream({ pull }), response);
};
"""


def test_a_connection_that_breaks_off_is_told_in_words(tab: Any) -> None:
    one = tab()
    one.context.add_init_script(BREAKS_OFF)
    page = one.page
    page.reload()
    set_max_tokens(page, 1_000_000)
    say(page, "hello")
    page.locator("#toast").get_by_text("the connection broke off").wait_for()
    assert said(page) == ["hello"]
    shows(box_of(page), "")


def test_a_story_that_was_not_cut_is_shown_whole(tab: Any, client: Any) -> None:
    client.story("whale", STORY_OF_FIVE)
    page = tab("#/s/whale").page
    put_cursor_before_the_end(page)
    gone: list[bool] = []

    def on_request(route: Any) -> None:
        if gone or route.request.method == "POST":
            gone.append(True)
            route.abort()
        else:
            route.continue_()

    page.route("**/whale**", on_request)
    page.keyboard.press("Control+Enter")
    page.get_by_text("the server does not answer").wait_for()
    page.locator(IDLE).wait_for()
    until(page, f"{STORY} === '{STORY_OF_FIVE}'")


# ---------------------------------------------------------------------------------------------
# What the browser keeps
# ---------------------------------------------------------------------------------------------

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
        page.get_by_role("heading", name="What shall we talk about?").wait_for()
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
    page.get_by_role("heading", name="What shall we talk about?").wait_for()
    shows(box, "")
    page.get_by_role("link", name="New story").click()
    beginning = page.get_by_label("Beginning of the story")
    beginning.fill("It was a dark and stormy night")
    page.reload()
    shows(beginning, "It was a dark and stormy night")
