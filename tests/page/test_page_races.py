"""Races on the page: quick actions, other tabs, failing requests, drafts."""

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
    ask,
    box_of,
    choose,
    edit_last,
    expect_value,
    messages,
    name_of,
    open_session,
    press,
    send,
    set_max_tokens,
    start_long_answer,
    stop_answer,
    until,
)

ENDLESS = {"message": "a long answer", "max_tokens": 10**6}
LONG = "once upon a time " * 10_000
STORY_OF_FIVE = "One two three four five."


@contextmanager
def hold_request(page: Any, place: str, method: str) -> Iterator[None]:
    """Hold a request during the block, and wait at its end until there is one."""
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


def block_polling(page: Any) -> None:
    """Keep the page from noticing changed sessions, for which it polls every few seconds."""
    page.route("**/v1/sessions", lambda route: route.abort())


# ---------------------------------------------------------------------------------------------
# Quick actions
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["Delete", "Rename", "Settings"])
def test_a_dialog_applies_to_the_session_it_was_opened_for(
    tab: Any, client: Any, what: str
) -> None:
    """The user goes back in the browser's history while the dialog is open."""
    client.chat("one", "first")
    client.chat("two", "second")
    page = tab(client.address("one")).page
    page.get_by_role("heading", name="one").wait_for()
    open_session(page, client, "two")
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


def test_a_session_created_late_does_not_replace_the_open_one(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    page = tab().page
    set_max_tokens(page, 1_000_000)
    box_of(page).fill("and at length")
    with hold_request(page, "**/v1/sessions", "POST"):
        box_of(page).press("Enter")
        page.get_by_role("link", name=re.compile("^one")).click()
        page.locator(".user-message").get_by_text("first").wait_for()
    until(page, "document.body.classList.contains('generating')")
    assert page.locator("#title").inner_text() == "one"
    assert page.url.endswith(client.address("one"))
    [name] = [name for name in client.names() if name != "one"]
    open_session(page, client, name)
    until(page, "document.querySelector('.answer').textContent.length > 20")
    page.go_back()
    page.keyboard.press("Escape")
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(200)
    assert answers(page) == ["so be it"]


def test_a_second_click_creates_no_second_session(tab: Any, client: Any) -> None:
    page = tab().page
    with hold_request(page, "**/v1/sessions", "POST"):
        send(page, "first")
        send(page, "second")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    page.wait_for_timeout(200)
    expect_value(box_of(page), "second")
    [name] = client.names()
    assert client.said(name) == ["first"]
    page.get_by_role("link", name="New story").click()
    page.get_by_label("Start of the story").fill("Once upon a time,")
    page.get_by_label("Tokens per passage").fill("5")
    with hold_request(page, "**/v1/sessions", "POST"):
        page.get_by_role("button", name="Write", exact=True).dblclick()
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(200)
    assert len(client.names()) == 2


@pytest.mark.parametrize("kind", ["chat", "story"])
def test_a_double_click_on_undo_removes_one_turn(tab: Any, client: Any, kind: str) -> None:
    if kind == "chat":
        client.chat("one", "first", "second", "third")
    else:
        client.story("one", "Once")
        for _ in range(3):
            client.done("/one/passages", max_tokens=3)
    page = tab(client.address("one")).page
    page.get_by_role("button", name="Undo").dblclick()
    until(page, "document.querySelector('#live').textContent.includes('removed')")
    page.wait_for_timeout(300)
    assert len(client.got("/one")["turns_list" if kind == "chat" else "passages"]) == 2


# ---------------------------------------------------------------------------------------------
# Other tabs
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["Undo", "Edit"])
def test_undo_and_edit_do_not_change_unseen_turns_of_another_tab(
    tab: Any, client: Any, what: str
) -> None:
    client.chat("one", "first", "second")
    page = tab(client.address("one")).page
    page.get_by_role("button", name=what).wait_for()
    block_polling(page)
    client.say("one", "from elsewhere", max_tokens=3)
    if what == "Edit":
        edit_last(page, "second, in other words")
    else:
        press(page, "Undo")
    page.locator(".user-message").get_by_text("from elsewhere").wait_for()
    page.wait_for_timeout(200)
    assert client.said("one") == messages(page) == ["first", "second", "from elsewhere"]
    expect_value(box_of(page), "second, in other words" if what == "Edit" else "")


def test_a_reload_of_the_session_keeps_the_answer_in_progress(tab: Any, client: Any) -> None:
    """The reload shows changes by another tab and finishes during the answer."""
    client.chat("one", "first")
    page = tab(client.address("one")).page
    page.get_by_role("button", name="Undo").wait_for()
    late: list[Any] = []
    page.route(f"**{client.path('/one')}", lambda route: late.append((route, route.fetch())))
    client.say("one", "second", max_tokens=3)
    while not late:
        page.wait_for_timeout(50)
    start_long_answer(page)
    for route, response in late:
        route.fulfill(response=response)
    page.unroute_all()
    page.wait_for_timeout(200)
    assert messages(page)[-1] == "a long answer"
    shown = "document.querySelector('.turn:last-child .answer').textContent.length"
    until(page, f"{shown} > {page.evaluate(shown)}")
    stop_answer(page)


def test_the_open_chat_is_updated_during_a_search(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    page = tab(client.address("one")).page
    page.get_by_label("Search chats and stories").fill("nowhere")
    page.get_by_text("No chats or stories found.").wait_for()
    client.say("one", "from elsewhere", max_tokens=3)
    page.locator(".user-message").get_by_text("from elsewhere").wait_for()


def test_an_outdated_cursor_does_not_cut_a_story(tab: Any, client: Any) -> None:
    client.story("whale", STORY_OF_FIVE)
    page = tab(client.address("whale")).page
    put_cursor_before_the_end(page)
    block_polling(page)
    text = STORY_OF_FIVE + client.done("/whale/passages", max_tokens=5)["text"]
    page.keyboard.press("Control+Enter")
    page.get_by_text("whale was changed by another").wait_for()
    until(page, f"{STORY}.length > {len(STORY_OF_FIVE)}")
    assert client.got("/whale")["text"] == page.evaluate(STORY) == text


def put_cursor_before_the_end(page: Any) -> None:
    page.locator(".chunk").wait_for()
    page.locator(".scroller").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Continue from the cursor").wait_for()


# ---------------------------------------------------------------------------------------------
# Failing requests
# ---------------------------------------------------------------------------------------------


def test_a_refused_message_keeps_the_draft(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    client.chat("two", "second")
    page = tab(client.address("one")).page
    box = box_of(page)
    block_polling(page)
    with client.answering("/one/answers", **ENDLESS):
        box.fill("refused")
        with hold_request(page, "**/answers", "POST"):
            box.press("Enter")
            until(page, "document.querySelector('textarea').value === ''")
            box.fill("another draft")
        page.get_by_text("session one is being answered").wait_for()
        expect_value(box, "refused\n\nanother draft")
        box.fill("refused again")
        with hold_request(page, "**/answers", "POST"):
            box.press("Enter")
            open_session(page, client, "two")
            page.locator(".user-message").get_by_text("second").wait_for()
        page.wait_for_timeout(500)
    page.unroute_all()
    open_session(page, client, "one")
    page.locator(".user-message").get_by_text("first").wait_for()
    expect_value(box, "refused again")


def test_a_message_in_prefill_survives_a_reload(tab: Any, client: Any, reading_seen: Any) -> None:
    """The server removes a message whose client disconnects, but not an answered one."""
    page = tab().page
    send(page, LONG)
    page.locator(".chat .status progress").wait_for()
    box_of(page).fill("what comes next")
    page.reload()
    reading_seen.set()
    expect_value(box_of(page), f"{LONG.strip()}\n\nwhat comes next")
    start_long_answer(page)
    name = name_of(page)
    page.reload()
    page.locator(".turn").wait_for()
    expect_value(box_of(page), "")
    assert client.said(name) == ["a long answer"]


def test_an_undone_message_survives_a_reload(tab: Any, client: Any) -> None:
    client.chat("one", "first", "second")
    page = tab(client.address("one")).page
    page.get_by_role("button", name="Undo").wait_for()
    # the page never gets the response
    page.route("**/undo", lambda _route: client.got("/one/undo", "POST", {}))
    press(page, "Undo")
    while len(client.said("one")) == 2:
        page.wait_for_timeout(20)
    page.reload()
    page.locator(".user-message").get_by_text("first").wait_for()
    expect_value(box_of(page), "second")


def test_a_returned_message_leaves_the_box_once_the_server_has_it(tab: Any, client: Any) -> None:
    """A server that stops during an answer saves the message but cannot confirm it."""
    client.chat("one", "first")
    page = tab(client.address("one")).page
    page.get_by_role("button", name="Edit").wait_for()
    page.route("**/answers", lambda route: route.abort())
    page.route(f"**{client.path('/one')}", lambda route: route.abort())
    send(page, "second")
    page.get_by_text("the server does not respond").wait_for()
    expect_value(box_of(page), "second")
    page.unroute_all()
    client.say("one", "second", max_tokens=3)
    page.locator(".user-message").get_by_text("second").wait_for()
    expect_value(box_of(page), "")


LOSE_CONNECTION = """
const real = fetch;
window.fetch = async (path, request) => {
  const response = await real(path, request);
  if (!String(path).endsWith("/answers")) return response;
  const reader = response.body.getReader();
  let left = 30;  // the answer has some tokens by then
  const pull = async (to) => {
    const { value } = await reader.read();
    if (left-- > 0) return to.enqueue(value);
    await reader.cancel();
    to.error(new TypeError("network error"));
  };
  return new Response(new ReadableStream({ pull }), response);
};
"""


def test_a_lost_connection_shows_an_error(tab: Any) -> None:
    one = tab()
    one.context.add_init_script(LOSE_CONNECTION)
    page = one.page
    page.reload()
    set_max_tokens(page, 1_000_000)
    ask(page, "hello")
    page.locator("#toast").get_by_text("the connection was lost").wait_for()
    assert messages(page) == ["hello"]
    expect_value(box_of(page), "")


def test_a_story_is_shown_whole_after_a_failed_cut(tab: Any, client: Any) -> None:
    client.story("whale", STORY_OF_FIVE)
    page = tab(client.address("whale")).page
    put_cursor_before_the_end(page)
    failing: list[bool] = []

    def on_request(route: Any) -> None:
        if failing or route.request.method == "POST":
            failing.append(True)
            route.abort()
        else:
            route.continue_()

    page.route(f"**{client.path('/whale')}**", on_request)
    page.keyboard.press("Control+Enter")
    page.get_by_text("the server does not respond").wait_for()
    page.locator(IDLE).wait_for()
    until(page, f"{STORY} === '{STORY_OF_FIVE}'")


# ---------------------------------------------------------------------------------------------
# Browser storage
# ---------------------------------------------------------------------------------------------

# Chromium's behaviour if the user blocks cookies.
FORBIDDEN = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
}"""
FULL = (
    """Storage.prototype.setItem = () => { throw new DOMException("no", "QuotaExceededError"); };"""
)


@pytest.mark.parametrize("script", [FORBIDDEN, FULL], ids=["forbidden", "full"])
def test_the_page_works_without_browser_storage(
    serve: Callable[..., Any], chromium: Any, endless: None, script: str
) -> None:
    client = serve(api_key="secret")
    with browsers.tabs(chromium, client.server.address) as open_tab:
        one = open_tab()
        one.context.add_init_script(script)
        page = one.page
        page.reload()
        page.get_by_label("API key (stored").fill("secret")
        press(page, "OK")
        choose(page, "Settings")
        page.get_by_label("Max tokens").fill("2")
        press(page, "Save")
        ask(page, "hello")
        page.get_by_text("Stopped at the token limit.").wait_for()
        press(page, "Memory")
        box_of(page).fill("a draft")
        page.get_by_role("link", name="New chat").click()
        page.get_by_role("heading", name="What would you like to talk about?").wait_for()
        page.go_back()
        expect_value(box_of(page), "a draft")
        page.get_by_role("link", name="New story").click()
        page.get_by_label("Tokens per passage").fill("3")
        page.get_by_label("Start of the story").fill("Once")
        press(page, "Write")
        page.get_by_role("button", name="Undo passage").wait_for()


def test_each_session_has_its_own_draft(tab: Any, client: Any) -> None:
    client.chat("one", "first")
    page = tab().page
    box = box_of(page)
    box.fill("to be sent some day")
    page.reload()
    expect_value(box, "to be sent some day")
    box.fill("")
    open_session(page, client, "one")
    page.locator(".user-message").wait_for()
    box.fill("a long draft")
    edit_last(page, "first, in other words")
    page.locator(".user-message").get_by_text("first, in other words").wait_for()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    expect_value(box, "a long draft")
    choose(page, "Rename")
    page.get_by_role("textbox", name="Name").fill("two")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="two").wait_for()
    page.reload()
    page.locator(".user-message").wait_for()
    assert messages(page) == ["first, in other words"]
    expect_value(box, "a long draft")
    page.get_by_role("link", name="New chat").click()
    page.get_by_role("heading", name="What would you like to talk about?").wait_for()
    expect_value(box, "")
    page.get_by_role("link", name="New story").click()
    start = page.get_by_label("Start of the story")
    start.fill("It was a dark and stormy night")
    page.reload()
    expect_value(start, "It was a dark and stormy night")
