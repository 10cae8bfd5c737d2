"""Several things at once on the page: quick hands, other tabs, slow and broken servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from browser import answers, say, shows, until

IDLE = "body:not(.making)"


def box_of(page: Any) -> Any:
    return page.get_by_label("Message", exact=True)


def chat(fake: Any, name: str, *messages: str) -> Any:
    session = fake.add(name)
    for message in messages:
        turn = {"user": message, "answer": f"To {message}", "finish": "stop", "attempt": 0}
        session.turns.append(turn)
    session.touch()
    return session


@contextmanager
def held(page: Any, place: str, method: str, n: int = 1) -> Iterator[None]:
    """While requests wait; the next lines run when `n` of them do, and they go on at the end."""
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
            if len(waiting) >= n:
                break
            page.wait_for_timeout(20)
        assert len(waiting) >= n
    finally:
        for route in waiting:
            route.continue_()
        page.unroute(place, on_request)


@pytest.mark.parametrize("what", ["Delete", "Rename", "Settings"])
def test_a_question_is_about_the_session_that_it_was_asked_for(
    tab: Any, fake: Any, what: str
) -> None:
    """Also where somebody goes back in the browser's history before answering it."""
    chat(fake, "one", "first")
    chat(fake, "two", "second")
    page = tab("#/s/one").page
    page.get_by_role("heading", name="one").wait_for()
    page.goto(f"{fake.address}/#/s/two")
    page.get_by_role("heading", name="two").wait_for()
    page.get_by_label("More").click()
    page.get_by_role("button", name=what).click()
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
    assert sorted(fake.sessions) == names[what]
    assert fake.sessions["one"].sampling["temperature"] != 0.25
    assert page.locator("#title").inner_text() == "one"


def test_a_session_that_comes_late_is_not_shown_over_another(tab: Any, fake: Any) -> None:
    chat(fake, "one", "first")
    page = tab().page
    box = box_of(page)
    box.fill("slowly please")
    with held(page, "**/v1/sessions", "POST"):
        box.press("Enter")
        page.get_by_role("link", name=re.compile("^one")).click()
        page.locator(".said").get_by_text("first").wait_for()
    until(page, "document.body.classList.contains('making')")
    assert page.locator("#title").inner_text() == "one"
    assert page.url.endswith("#/s/one")
    page.goto(f"{fake.address}/#/s/chat-2")
    page.locator(".answer").get_by_text("word 3.").wait_for()
    page.go_back()
    page.keyboard.press("Escape")
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(200)
    assert answers(page) == ["To first"]


def test_a_story_is_begun_once(tab: Any, fake: Any) -> None:
    page = tab("#/new-story").page
    page.get_by_label("Beginning of the story").fill("Once upon a time,")
    with held(page, "**/v1/sessions", "POST"):
        page.get_by_role("button", name="Write", exact=True).dblclick()
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()
    page.wait_for_timeout(200)
    assert list(fake.sessions) == ["chat-1"]


def test_a_chat_is_begun_once(tab: Any, fake: Any) -> None:
    page = tab().page
    box = box_of(page)
    with held(page, "**/v1/sessions", "POST"):
        box.fill("first")
        box.press("Enter")
        box.fill("second")
        box.press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    page.wait_for_timeout(200)
    assert list(fake.sessions) == ["chat-1"]
    shows(box, "second")
    assert [turn["user"] for turn in fake.sessions["chat-1"].turns] == ["first"]


@pytest.mark.parametrize("kind", ["chat", "story"])
def test_a_double_click_takes_back_once(tab: Any, fake: Any, kind: str) -> None:
    if kind == "chat":
        session = chat(fake, "one", "first", "second", "third")
    else:
        session = fake.add("one", kind="story", text="a, b, c")
        session.passages = [1, 3, 5]
    page = tab("#/s/one").page
    page.get_by_role("button", name="Undo").dblclick()
    until(page, "document.querySelector('#live').textContent.includes('taken back')")
    page.wait_for_timeout(300)
    assert len(session.turns if kind == "chat" else session.passages) == 2


def test_a_message_that_was_taken_back_survives_a_reload(tab: Any, fake: Any) -> None:
    session = chat(fake, "one", "first", "second")
    page = tab("#/s/one").page
    page.get_by_role("button", name="Undo").wait_for()
    page.route("**/undo", lambda _route: fake.sessions["one"].turns.pop())  # the answer never comes
    page.get_by_role("button", name="Undo").click()
    while len(session.turns) == 2:
        page.wait_for_timeout(20)
    session.touch()
    page.reload()
    page.locator(".said").get_by_text("first").wait_for()
    shows(box_of(page), "second")


@pytest.mark.parametrize("how", ["seen", "taken back"])
def test_an_edit_ends_where_its_message_is_the_last_one_no_more(
    tab: Any, fake: Any, how: str
) -> None:
    session = chat(fake, "one", "first", "second")
    page = tab("#/s/one").page
    page.get_by_role("button", name="Edit").click()
    box_of(page).fill("second, in other words")
    if how == "seen":
        turn = {"user": "from elsewhere", "answer": "so", "finish": "stop", "attempt": 0}
        session.turns.append(turn)
        session.touch()
        page.locator(".said").get_by_text("from elsewhere").wait_for()
    else:
        page.get_by_role("button", name="Undo").click()
        page.locator(".turn").nth(1).wait_for(state="detached")
    page.get_by_text("You are changing your last message.").wait_for(state="hidden")
    shows(box_of(page), "second, in other words")
    kept = [turn["user"] for turn in session.turns]
    box_of(page).press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    until(page, "document.querySelector('textarea').value === ''")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    assert [turn["user"] for turn in session.turns] == [*kept, "second, in other words"]


@pytest.mark.parametrize("what", ["Undo", "Edit"])
def test_what_another_tab_has_said_is_not_taken_back_unseen(tab: Any, fake: Any, what: str) -> None:
    session = chat(fake, "one", "first", "second")
    page = tab("#/s/one").page
    page.get_by_role("button", name=what).wait_for()
    if what == "Edit":
        page.get_by_role("button", name="Edit").click()
        box_of(page).fill("second, in other words")
    # The page looks every few seconds whether a session has changed: here it is not to see it.
    page.route("**/v1/sessions", lambda route: route.abort())
    other = {"user": "from elsewhere", "answer": "so", "finish": "stop", "attempt": 0}
    session.turns.append(other)
    session.touch()
    if what == "Edit":
        box_of(page).press("Enter")
    else:
        page.get_by_role("button", name="Undo").click()
    page.locator(".said").get_by_text("from elsewhere").wait_for()
    page.wait_for_timeout(200)
    assert [turn["user"] for turn in session.turns] == ["first", "second", "from elsewhere"]
    assert page.locator(".said").all_inner_texts() == ["first", "second", "from elsewhere"]
    shows(box_of(page), "second, in other words" if what == "Edit" else "")


def test_an_answer_in_the_making_stays_where_the_session_is_read_again(tab: Any, fake: Any) -> None:
    """As of other tabs, which is asked for now and then."""
    session = chat(fake, "one", "first")
    page = tab("#/s/one").page
    page.get_by_role("button", name="Undo").wait_for()
    late: list[Any] = []
    page.route("**/sessions/one", lambda route: late.append((route, route.fetch())))
    session.touch()
    while not late:
        page.wait_for_timeout(50)
    box_of(page).fill("slowly please")
    box_of(page).press("Enter")
    page.locator(".answer").get_by_text("word 3.").wait_for()
    for route, response in late:
        route.fulfill(response=response)
    page.unroute_all()
    page.wait_for_timeout(200)
    assert page.locator(".said").all_inner_texts() == ["first", "slowly please"]
    page.locator(".answer").get_by_text("word 9.").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("The answer was stopped.").wait_for()


def test_a_draft_survives_an_edit_of_the_last_message(tab: Any, fake: Any) -> None:
    session = chat(fake, "one", "first")
    page = tab("#/s/one").page
    box = box_of(page)
    for ends in ("cancelled", "sent"):
        box.fill("a long draft")
        page.get_by_role("button", name="Edit").click()
        shows(box, session.turns[0]["user"])
        if ends == "cancelled":
            page.get_by_role("button", name="Cancel").click()
        else:
            box.fill("first, in other words")
            box.press("Enter")
            page.locator(".said").get_by_text("first, in other words").wait_for()
            page.locator(f"{IDLE} .turn-actions").wait_for()
        shows(box, "a long draft")
    page.reload()
    shows(box, "a long draft")


def test_a_draft_survives_a_message_that_comes_back(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "hello")
    fake.sessions["chat-1"].answering = True
    box = box_of(page)
    box.fill("refused")
    with held(page, "**/answers", "POST"):
        box.press("Enter")
        until(page, "document.querySelector('textarea').value === ''")
        box.fill("another draft")
    page.get_by_text("session chat-1 is being answered").wait_for()
    shows(box, "refused\n\nanother draft")
    page.route("**/answers", lambda _route: None)
    box.fill("read all of this")
    box.press("Enter")
    until(page, "document.body.classList.contains('making')")
    box.fill("what comes next")
    page.reload()
    shows(box, "read all of this\n\nwhat comes next")


def test_a_draft_goes_along_with_a_new_name(tab: Any, fake: Any) -> None:
    chat(fake, "one", "first")
    page = tab("#/s/one").page
    box_of(page).fill("a draft")
    page.get_by_label("More").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("textbox", name="Name").fill("two")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="two").wait_for()
    shows(box_of(page), "a draft")


def test_a_message_that_is_refused_behind_another_session_is_not_lost(tab: Any, fake: Any) -> None:
    chat(fake, "one", "first").answering = True
    chat(fake, "two", "second")
    page = tab("#/s/one").page
    box = box_of(page)
    box.fill("refused")
    with held(page, "**/answers", "POST"):
        box.press("Enter")
        page.get_by_role("link", name=re.compile("^two")).click()
        page.locator(".said").get_by_text("second").wait_for()
    page.get_by_text("session one is being answered").wait_for()
    page.wait_for_timeout(200)
    page.get_by_role("link", name=re.compile("^one")).click()
    page.locator(".said").get_by_text("first").wait_for()
    shows(box, "refused")


def test_a_message_that_has_arrived_after_all_leaves_the_box(tab: Any, fake: Any) -> None:
    """A server that ends in the middle of an answer saves it, and cannot say so any more."""
    session = chat(fake, "one", "first")
    page = tab("#/s/one").page
    page.get_by_role("button", name="Edit").wait_for()
    page.route("**/answers", lambda route: route.abort())
    page.route("**/sessions/one", lambda route: route.abort())
    box = box_of(page)
    box.fill("second")
    box.press("Enter")
    page.get_by_text("the server does not answer").wait_for()
    shows(box, "second")
    page.unroute_all()
    turn = {"user": "second", "answer": "half of", "finish": "interrupted", "attempt": 0}
    session.turns.append(turn)
    session.touch()
    page.locator(".answer").get_by_text("half of").wait_for()
    shows(box, "")


def test_a_story_that_was_not_cut_is_shown_whole(tab: Any, fake: Any) -> None:
    fake.add("whale", kind="story", text="One two three four five.")
    page = tab("#/s/whale").page
    page.locator(".chunk").wait_for()
    page.locator(".scroller").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Write on from the cursor").wait_for()
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
    until(
        page,
        "document.querySelector('.page-text').textContent === 'One two three four five.'",
    )


def test_the_cursor_of_a_story_that_was_changed_elsewhere_cuts_nothing(tab: Any, fake: Any) -> None:
    session = fake.add("whale", kind="story", text="One two three four five.")
    page = tab("#/s/whale").page
    page.locator(".chunk").wait_for()
    page.locator(".scroller").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Write on from the cursor").wait_for()
    session.text += " And a passage that was written elsewhere."
    session.touch()
    page.keyboard.press("Control+Enter")
    page.get_by_text("whale was changed elsewhere").wait_for()
    page.locator(".chunk").get_by_text("written elsewhere.").wait_for()
    assert session.text.endswith("written elsewhere.")


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


def test_a_connection_that_breaks_off_is_told_in_words(tab: Any, fake: Any) -> None:
    one = tab()
    one.context.add_init_script(BREAKS_OFF)
    page = one.page
    page.reload()
    say(page, "slowly please")
    page.locator("#toast").get_by_text("the connection broke off").wait_for()
    assert answers(page)[0].startswith("word 0.")
    shows(box_of(page), "")


def test_a_key_that_cannot_be_sent_is_asked_for_again(tab: Any, fake: Any) -> None:
    """As one that was copied with the quotes of a letter."""
    fake.api_key = "secret"
    page = tab().page
    page.locator("dialog input").fill("\u201csecret\u201d")
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    page.locator("dialog input").fill("secret")
    page.keyboard.press("Enter")
    say(page, "hello")


def test_the_way_back_leads_over_a_session_that_is_gone(tab: Any, fake: Any) -> None:
    chat(fake, "one", "first")
    chat(fake, "two", "second")
    page = tab("#/s/one").page
    page.locator(".said").get_by_text("first").wait_for()
    page.goto(f"{fake.address}/#/s/two")
    page.locator(".said").get_by_text("second").wait_for()
    page.goto(f"{fake.address}/#/new")
    page.get_by_role("heading", name="New chat").wait_for()
    del fake.sessions["two"]
    page.go_back()
    page.get_by_text("there is no session two").wait_for()
    page.get_by_role("heading", name="New chat").wait_for()
    page.go_back()
    page.locator(".said").get_by_text("first").wait_for()
