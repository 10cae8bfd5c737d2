"""Chats on the page, in a browser: through the keys and buttons that people have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from browser import answers, say, shows, until

WAYS = ("Earlier", "Later")


def test_thirty_turns_survive_a_reload_and_a_second_tab(tab: Any, fake: Any) -> None:
    one = tab()
    page = one.page
    for n in range(30):
        say(page, f"message {n}")
    assert len(answers(page)) == 30
    assert re.search(r"#/s/chat-1$", page.url)
    page.reload()
    page.locator(".turn").nth(29).wait_for()
    shown = answers(page)
    assert shown[29].startswith("Answer 1 to message 29: it is so.")
    second = one.open("#/s/chat-1")
    second.locator(".turn").nth(29).wait_for()
    assert answers(second) == shown
    say(page, "from the first tab")
    second.bring_to_front()
    second.locator(".answer").get_by_text("Answer 1 to from the first tab").wait_for()


def test_an_answer_can_be_stopped_and_gone_on_with(tab: Any, fake: Any) -> None:
    page = tab().page
    box = page.get_by_label("Message", exact=True)
    box.fill("slowly please")
    box.press("Enter")
    page.locator(".answer").get_by_text("word 3.").wait_for()
    box.press("Escape")
    page.get_by_text("The answer was stopped.").wait_for()
    [turn] = fake.sessions["chat-1"].turns
    assert turn["finish"] == "interrupted"
    assert "word 199." not in turn["answer"]
    page.get_by_role("button", name="Continue").click()
    page.locator(".answer").get_by_text("And so on.").wait_for()
    assert answers(page) == [turn["answer"].strip()]


def test_an_answer_that_repeats_itself_can_be_gone_on_with(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "round and round")
    page.get_by_text("The answer was ended: it only repeated itself.").wait_for()
    page.get_by_role("button", name="Continue").click()
    page.locator(".answer").get_by_text("And so on.").wait_for()


def test_regenerate_edit_and_undo(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "first")
    say(page, "second")
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".answer").get_by_text("Answer 2 to second").wait_for()
    page.get_by_text("2 of 2").wait_for()
    page.locator("body:not(.making) .turn-actions").wait_for()
    box = page.get_by_label("Message", exact=True)
    box.press("ArrowUp")
    assert box.input_value() == "second"
    box.press("Escape")
    assert box.input_value() == ""
    box.press("ArrowUp")
    say(page, "second, in other words")
    assert [turn["user"] for turn in fake.sessions["chat-1"].turns] == [
        "first",
        "second, in other words",
    ]
    page.get_by_role("button", name="Undo").click()
    page.locator(".turn").nth(1).wait_for(state="detached")
    shows(box, "second, in other words")
    assert len(fake.sessions["chat-1"].turns) == 1


def test_earlier_answers_come_back(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "first")
    say(page, "second")
    swipe = page.get_by_role("group", name="Answers")
    assert swipe.count() == 0
    for number in (2, 3):
        page.get_by_role("button", name="Regenerate").click()
        swipe.filter(has_text=f"{number} of {number}").wait_for()
    earlier, later = (page.get_by_role("button", name=f"{way} answer") for way in WAYS)
    assert later.is_disabled()
    earlier.focus()
    for number, way in ((2, "Earlier"), (1, "Later")):
        page.keyboard.press("Enter")
        swipe.filter(has_text=f"{number} of 3").wait_for()
        page.locator(".answer").get_by_text(f"Answer {number} to second").wait_for()
        page.locator(f"button:focus[aria-label='{way} answer']").wait_for()
    assert [turn["attempt"] for turn in fake.sessions["chat-1"].turns] == [0, 0]
    assert earlier.is_disabled()
    page.reload()
    swipe.filter(has_text="1 of 3").wait_for()
    later.click()
    page.locator(".answer").get_by_text("Answer 2 to second").wait_for()
    say(page, "third")
    assert swipe.count() == 0
    assert answers(page)[1].startswith("Answer 2 to second")


def test_an_answer_that_is_gone_is_told(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "first")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2 of 2").wait_for()
    fake.sessions["chat-1"].replaced.clear()
    page.get_by_role("button", name="Earlier answer").click()
    page.get_by_text("the last message has the attempts [1]").wait_for()
    assert answers(page)[0].startswith("Answer 2 to first")


def test_sessions_are_found_renamed_exported_imported_and_deleted(
    tab: Any, fake: Any, tmp_path: Path
) -> None:
    page = tab().page
    say(page, "about whales")
    page.keyboard.press("Control+Shift+O")
    page.get_by_role("heading", name="New chat").wait_for()
    say(page, "about ships")
    page.keyboard.press("Control+k")
    page.keyboard.type("whales")
    items = page.locator(".sessions a")
    items.get_by_text("about ships").wait_for(state="detached")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="chat-1").wait_for()
    page.get_by_label("More").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("textbox", name="Name").fill("wäles & co?")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="wäles & co?").wait_for()
    page.get_by_label("More").click()
    page.get_by_role("button", name="Export", exact=True).click()
    page.get_by_label("As").select_option("json")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    exported = tmp_path / "exported.json"
    download.value.save_as(exported)
    assert json.loads(exported.read_text())["turns"][0]["user"] == "about whales"
    page.get_by_label("Exported session").set_input_files(exported)
    page.get_by_role("heading", name="There is wäles & co? already").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="wäles & co?-2").wait_for()
    page.get_by_label("More").click()
    page.get_by_role("button", name="Delete").click()
    page.locator("dialog").get_by_role("button", name="Delete").click()
    page.get_by_role("heading", name="New chat").wait_for()
    assert sorted(fake.sessions) == ["chat-2", "wäles & co?"]


def test_settings_and_the_model_go_to_the_server(tab: Any, fake: Any) -> None:
    page = tab().page
    page.get_by_label("Model").select_option("other")
    page.get_by_label("More").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("You are a sailor.")
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_role("button", name="Save", exact=True).click()
    say(page, "hello")
    session = fake.sessions["chat-1"]
    assert session.model == "other"
    assert session.system == "You are a sailor."
    assert session.sampling["temperature"] == 0.2
    assert session.turns[0]["finish"] == "length"
    page.get_by_text("The answer was cut by its limit.").wait_for()


def test_a_long_prompt_shows_how_far_it_is(tab: Any) -> None:
    page = tab().page
    box = page.get_by_label("Message", exact=True)
    box.fill("read a book")
    box.press("Enter")
    page.get_by_text(
        re.compile(r"Reading [\d,]+ of 4,000 tokens · 250 tokens/s · 1.5 s left")
    ).wait_for()
    page.locator("progress").wait_for()
    page.locator(".answer").get_by_text("Answer 1 to read a book").wait_for()
    page.locator("progress").wait_for(state="detached")


def test_text_files_become_part_of_the_message(tab: Any, fake: Any, tmp_path: Path) -> None:
    page = tab().page
    picker = page.get_by_label("Text files", exact=True)
    large, binary, good = tmp_path / "large.txt", tmp_path / "binary.txt", tmp_path / "poem.txt"
    large.write_text("a" * 1_100_000)
    binary.write_bytes(b"\xff\xfe\x00")
    good.write_text("roses\n```\nred")
    picker.set_input_files(large)
    page.get_by_text("large.txt has 1.0 MiB: a message takes text files of up to 1 MiB").wait_for()
    picker.set_input_files(binary)
    page.get_by_text("binary.txt is no text in UTF-8").wait_for()
    picker.set_input_files(good)
    page.get_by_text("poem.txt · 13 characters").wait_for()
    say(page, "read this")
    [turn] = fake.sessions["chat-1"].turns
    assert turn["user"] == "read this\n\npoem.txt:\n\n````\nroses\n```\nred\n````"


BLANKS = """() => {
  window.blanks = 0;
  const status = document.querySelector(".chat .reading");
  const watch = () => {
    const hasBegun = document.querySelector(".answer").textContent;
    if (!status.children.length && !hasBegun) window.blanks += 1;
  };
  new MutationObserver(watch).observe(status, { childList: true });
}"""
IN_SIGHT = """() => {
  const { scrollHeight, scrollTop, clientHeight } = document.querySelector(".chat .scroller");
  const bottom = document.querySelector(".chat progress")?.getBoundingClientRect().bottom;
  return scrollTop > 1000 && scrollHeight - scrollTop - clientHeight < 5 && bottom < innerHeight;
}"""


def test_the_end_of_a_long_message_and_how_far_it_is_read_are_in_sight(tab: Any) -> None:
    page = tab().page
    box = page.get_by_label("Message", exact=True)
    box.wait_for()
    page.evaluate(BLANKS)
    box.fill("read\n" + "a line\n" * 500)
    box.press("Enter")
    until(page, IN_SIGHT)
    page.locator(".answer").get_by_text("it is so").wait_for()
    assert page.evaluate("window.blanks") <= 1  # as the answer begins


def test_what_is_written_survives_a_reload(tab: Any, fake: Any) -> None:
    page = tab().page
    box = page.get_by_label("Message", exact=True)
    box.fill("to be sent some day")
    page.reload()
    shows(box, "to be sent some day")
    say(page, "hello")
    shows(box, "")
    box.fill("to be sent here")
    page.goto(f"{fake.address}/#/new")
    page.get_by_role("heading", name="New chat").wait_for()
    shows(box, "")
    page.goto(f"{fake.address}/#/s/chat-1")
    page.locator(".answer").get_by_text("Answer 1 to hello").wait_for()
    shows(box, "to be sent here")


def test_a_message_that_was_not_read_to_its_end_survives_a_reload(tab: Any, fake: Any) -> None:
    """The server takes it back when the tab leaves; one that was answered does not come again."""
    page = tab().page
    box = page.get_by_label("Message", exact=True)
    box.fill("read all of this")
    box.press("Enter")
    page.locator(".chat .reading").get_by_text("of 4,000 tokens").wait_for()
    page.reload()
    shows(box, "read all of this")
    box.fill("slowly please")
    box.press("Enter")
    page.locator(".answer").get_by_text("word 3.").wait_for()
    page.reload()
    page.locator(".answer").get_by_text("word 3.").wait_for()
    shows(box, "")


def test_the_beginning_of_a_story_survives_a_reload(tab: Any) -> None:
    page = tab("#/new-story").page
    beginning = page.get_by_label("Beginning of the story")
    beginning.fill("It was a dark and stormy night")
    page.reload()
    shows(beginning, "It was a dark and stormy night")


def test_the_api_key_is_asked_for_once(tab: Any, fake: Any) -> None:
    fake.api_key = "secret"
    one = tab()
    one.page.locator("dialog input").fill("secret")
    one.page.keyboard.press("Enter")
    say(one.page, "hello")
    one.page.reload()
    one.page.locator(".answer").get_by_text("Answer 1 to hello").wait_for()
    assert one.page.locator("dialog").count() == 0


def test_what_was_refused_is_told_and_not_lost(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "hello")
    del fake.sessions["chat-1"]
    box = page.get_by_label("Message", exact=True)
    box.fill("hello")
    box.press("Enter")
    page.get_by_text("there is no session chat-1").wait_for()
    shows(box, "hello")
    assert len(answers(page)) == 1


def test_an_answer_that_could_not_be_made_again_is_still_there(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "hello")
    shown = answers(page)
    fake.sessions["chat-1"].answering = True
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("session chat-1 is being answered").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert answers(page) == shown
    fake.close()
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("the server does not answer").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert answers(page) == shown


def test_the_server_draws_the_seed_of_each_chat(tab: Any, fake: Any) -> None:
    page = tab().page
    for number in (1, 2):
        page.goto(f"{fake.address}/#/new")
        page.get_by_role("heading", name="New chat").wait_for()
        say(page, "hello")
        page.get_by_role("heading", name=f"chat-{number}").wait_for()
    seeds = {session.sampling["seed"] for session in fake.sessions.values()}
    assert len(seeds) == 2
    page.get_by_label("More").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator("dialog").wait_for(state="detached")
    until(page, "!document.querySelector('dialog')")
    page.wait_for_timeout(200)
    assert fake.sessions["chat-2"].sampling["seed"] == 7


def test_a_phone_scrolls_in_one_direction(tab: Any) -> None:
    phone = {"viewport": {"width": 375, "height": 667}, "has_touch": True, "is_mobile": True}
    page = tab(**phone).page
    say(
        page,
        "echo "
        + "x" * 500
        + "\n\n```\n"
        + "y" * 500
        + "\n```\n\n| a | b |\n|---|---|\n| "
        + "z" * 300
        + " | b |",
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.evaluate("document.querySelector('.scroller').scrollWidth") <= 375
    page.get_by_role("button", name="Chats and stories").tap()
    page.get_by_role("link", name=re.compile("chat-1")).tap()
    page.locator("#sessions:not(.open)").wait_for(state="attached")
    page.get_by_role("button", name="Memory").tap()
    page.locator(".strip canvas").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_keyboard_only(tab: Any, fake: Any) -> None:
    page = tab().page
    page.locator("textarea:focus").wait_for()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert fake.sessions["chat-1"].turns[0]["user"] == "first line\nsecond line"
    page.get_by_role("button", name="Regenerate").focus()
    page.keyboard.press("Enter")
    page.locator(".answer").get_by_text("Answer 2 to").wait_for()
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="Keys").wait_for(state="detached")
    page.keyboard.press("Control+k")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="chat-1").wait_for()


def test_an_open_chat_is_given_another_model(tab: Any, fake: Any) -> None:
    page = tab().page
    say(page, "first")
    chooser = page.get_by_label("Model", exact=True)
    assert chooser.input_value() == "tiny"
    chooser.select_option("other")
    page.get_by_role("button", name="Cancel").click()
    assert page.get_by_label("Model", exact=True).input_value() == "tiny"
    page.get_by_label("Model", exact=True).select_option("other")
    page.get_by_role("button", name="Change the model").click()
    page.locator("dialog").wait_for(state="detached")
    say(page, "second")
    assert page.get_by_label("Model", exact=True).input_value() == "other"
    assert fake.sessions["chat-1"].model == "other"


def test_other_settings_leave_the_system_prompt_as_it_is(tab: Any, fake: Any) -> None:
    """It may have come from a file: another one has all be read again."""
    session = fake.add("one", system="You are a sailor.\r\nBe short.\n")
    page = tab("#/s/one").page
    page.get_by_role("heading", name="one").wait_for()
    page.get_by_label("More").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator("dialog").wait_for(state="detached")
    page.wait_for_timeout(200)
    assert session.sampling["temperature"] == 0.2
    assert session.system == "You are a sailor.\r\nBe short.\n"


def test_an_answer_is_copied_over_a_plain_connection_too(tab: Any) -> None:
    """Where the server is another machine, browsers keep their clipboard from the page."""
    one = tab()
    one.context.add_init_script("delete Navigator.prototype.clipboard")
    page = one.page
    page.reload()
    say(page, "echo first\n\n```\nsecond\n```")
    box = page.get_by_label("Message", exact=True)
    for name, copied in (("Copy", "second"), ("Copy", "first\n\n```\nsecond\n```")):
        button = page.locator(".code" if copied == "second" else ".foot").get_by_role(
            "button", name=name
        )
        button.click()
        page.locator(".code" if copied == "second" else ".foot").get_by_text("Copied").wait_for()
        box.fill("")
        box.press("Control+v")
        shows(box, copied)


def test_a_search_keeps_no_open_chat_from_being_renewed(tab: Any, fake: Any) -> None:
    one = tab()
    say(one.page, "hello")
    one.page.get_by_label("Search chats and stories").fill("nowhere")
    one.page.get_by_text("Nothing has these words.").wait_for()
    second = one.open("#/s/chat-1")
    say(second, "from the other tab")
    one.page.bring_to_front()
    one.page.locator(".answer").get_by_text("Answer 1 to from the other tab").wait_for()
