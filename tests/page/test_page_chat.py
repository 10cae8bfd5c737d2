"""Chats on the page: messages, answers, errors, sessions, navigation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import browser as browsers
from browser import (
    IDLE,
    WIDE,
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
from needed import needed
from pdf_file import pdf_of

serving = needed("serving_program", name="the server's packages")
several = needed("several_models", name="the server's packages")

PHONE = {"viewport": {"width": 375, "height": 667}, "has_touch": True, "is_mobile": True}
ENDLESS = {"message": "a long answer", "max_tokens": 10**6}


# ---------------------------------------------------------------------------------------------
# Messages and answers
# ---------------------------------------------------------------------------------------------


def test_statistics_match_the_server_after_many_turns(tab: Any, client: Any) -> None:
    """A reload and a second tab show the same answers."""

    def statistic(name: str) -> str:
        return str(page.locator(f".numbers dt:text-is('{name}') + dd").inner_text())

    one = tab(**WIDE)
    page = one.page
    page.get_by_text("Statistics", exact=True).click()
    set_max_tokens(page, 24)
    pictures = set()
    for n in range(15):
        ask(page, f"message {n}")
        if n % 5 == 4:
            page.wait_for_timeout(200)
            pictures.add(page.evaluate("document.querySelector('.strip canvas').toDataURL()"))
    assert len(pictures) == 3
    name = name_of(page)
    assert client.said(name) == [f"message {n}" for n in range(15)]
    kv = client.got(f"/{name}/map")["kv"]
    assert kv["compactions"] > 10
    page.locator(".numbers").get_by_text(f"{kv['position']:,}", exact=True).wait_for()
    assert statistic("In the cache") == f"{kv['used']} of {kv['capacity']}"
    assert statistic("Compactions") == f"{kv['compactions']}"
    assert statistic("Speed").endswith(" tokens/s")
    assert re.fullmatch(r"after [\d.]+ s", statistic("First token"))
    slots = client.server.get("/v1/kv").json["data"]
    assert kv["position"] in [slot["tokens"] for slot in slots]
    shown = answers(page)
    page.reload()
    page.locator(".turn").nth(14).wait_for()
    assert answers(page) == shown
    second = one.open(client.address(name))
    second.locator(".turn").nth(14).wait_for()
    assert answers(second) == shown
    ask(page, "from the first tab")
    second.bring_to_front()
    second.locator(".user-message").get_by_text("from the first tab").wait_for()


def test_regenerate_edit_and_undo_change_the_session(tab: Any, client: Any) -> None:
    page = tab(**WIDE).page
    ask(page, "first")
    ask(page, "second")
    name, attempts = name_of(page), page.get_by_role("group", name="Answers")
    assert attempts.count() == 0
    for number in (2, 3):
        press(page, "Regenerate")
        attempts.filter(has_text=f"{number} of {number}").wait_for()
        page.locator(IDLE).wait_for()
    earlier, later = (
        page.get_by_role("button", name=f"{way} answer") for way in ("Previous", "Next")
    )
    assert later.is_disabled()
    earlier.focus()
    for number, way in ((2, "Previous"), (1, "Next")):  # the enabled button has the focus
        page.keyboard.press("Enter")
        attempts.filter(has_text=f"{number} of 3").wait_for()
        page.locator(f"button:focus[aria-label='{way} answer']").wait_for()
    assert earlier.is_disabled()
    chosen = client.got(f"/{name}")["turns_list"][-1]
    assert (chosen["attempt"], chosen["attempts"]) == (0, [0, 1, 2])
    page.reload()
    attempts.filter(has_text="1 of 3").wait_for()
    # browsers collapse white space
    assert answers(page)[1].split() == chosen["answer"].split()
    box = box_of(page)
    box.press("ArrowUp")
    dialog = page.get_by_role("dialog").get_by_role("textbox")
    expect_value(dialog, "second")
    dialog.press("Escape")
    edit_last(page, "second, in other words")
    page.locator(".user-message").get_by_text("second, in other words").wait_for()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    assert client.said(name) == ["first", "second, in other words"]
    assert attempts.count() == 0
    press(page, "Undo")
    expect_value(box, "second, in other words")
    page.locator(".turn").nth(1).wait_for(state="detached")
    assert client.said(name) == ["first"]


def test_a_cut_or_stopped_answer_can_be_continued(tab: Any, client: Any) -> None:
    page = tab().page
    ask(page, "hello")
    page.get_by_text("Stopped at the token limit.").wait_for()
    shown = "document.querySelector('.answer').textContent.length"
    n_shown = page.evaluate(shown)
    press(page, "Continue")
    until(page, f"{shown} > {n_shown}")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    name = name_of(page)
    [turn] = client.got(f"/{name}")["turns_list"]
    assert turn["end"] - turn["answer_start"] >= 12
    assert answers(page)[0].split() == turn["answer"].split()
    start_long_answer(page)
    stop_answer(page)
    page.get_by_text("Stopped.", exact=True).wait_for()
    assert client.got(f"/{name}")["turns_list"][1]["finish"] == "interrupted"
    page.get_by_role("button", name="Continue").wait_for()


def test_a_suggestion_names_the_chat(tab: Any, client: Any) -> None:
    """The name is shown during the answer, and the speed during and after it."""
    page = tab().page
    set_max_tokens(page, 1_000_000)
    page.get_by_role("button", name="Explain something").click()
    name = "Explain why the sky is blue, in three sentences"
    page.get_by_role("heading", name=name).wait_for()
    page.locator("#sessions").get_by_text("answering").wait_for()
    assert client.names() == [name_of(page)] == [name]
    page.locator(".chat > .status").get_by_text(re.compile(r"^[\d.]+ tokens/s$")).wait_for()
    stop_answer(page)
    page.locator(".footer").get_by_text(re.compile(r"^[\d.]+ tokens/s$")).wait_for()
    page.locator("#sessions").get_by_text("1 turn").wait_for()
    assert messages(page) == [
        "Explain why the sky is blue, in three sentences that a child understands."
    ]


def test_the_first_message_is_shown_while_the_model_loads(tab: Any, client: Any) -> None:
    """If that fails, it returns to the box."""
    page = tab().page
    held: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.method == "POST":
            held.append(route)
        else:
            route.continue_()

    page.route("**/v1/sessions", hold)
    for number in (1, 2):
        send(page, "hello there")
        page.get_by_text("Opening tiny").wait_for()
        assert messages(page) == ["hello there"]
        assert box_of(page).input_value() == ""
        if number == 1:
            held.pop().abort()
            page.get_by_text("the server does not respond").wait_for()
            expect_value(box_of(page), "hello there")
            assert messages(page) == []
            page.get_by_role("heading", name="What would you like to talk about?").wait_for()
    held.pop().continue_()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    assert client.said(name_of(page)) == messages(page) == ["hello there"]


def test_a_long_prompt_shows_prefill_progress(tab: Any, reading_seen: Any) -> None:
    """The end of the prompt and the progress are visible until the answer starts."""
    page = tab().page
    send(page, "once upon a time " * 1500)
    until(
        page,
        """(() => {
          const progress = document.querySelector("progress");
          const label = /^Reading [\\d,]+ of [\\d,]+ tokens$/;
          if (!progress || !label.test(progress.parentElement.textContent)) return false;
          const { scrollHeight, scrollTop, clientHeight } = document.querySelector(".scroller");
          const fromEnd = scrollHeight - scrollTop - clientHeight;
          const { bottom } = progress.getBoundingClientRect();
          return scrollTop > 1000 && fromEnd < 5 && bottom < innerHeight;
        })()""",
    )
    reading_seen.set()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    page.locator("progress").wait_for(state="detached")


def test_attached_files_become_part_of_the_message(tab: Any, client: Any, tmp_path: Path) -> None:
    """Text and PDF files are chips in the box and folded lines in the chat."""
    page = tab().page
    picker = page.get_by_label("Files to add", exact=True)
    names = ("large.txt", "binary.txt", "cat.png", "poem.txt", "tale.pdf", "scan.pdf")
    large, binary, picture, good, pdf, scan = (tmp_path / name for name in names)
    large.write_text("a" * 1_100_000)
    binary.write_bytes(b"\xff\xfe\x00")
    picture.write_bytes(b"")
    scan.write_bytes(pdf_of("", ""))
    for file, message in (
        (large, "large.txt has 1.0 MiB of text: the limit for attached files is 1 MiB"),
        (binary, "binary.txt is not a text file in UTF-8"),
        (picture, "this model cannot read cat.png: start pyh2o with --mmproj FILE"),
        (scan, "scan.pdf contains scanned pages without text"),
    ):
        picker.set_input_files(file)
        page.get_by_text(message).wait_for()
    chips = page.locator(".chips li")
    assert chips.count() == 0
    good.write_text("roses\n```\nred")
    pdf.write_bytes(pdf_of("Once upon", "a time"))
    box = box_of(page)
    box.fill("read this")
    picker.set_input_files([good, pdf, large])
    page.get_by_label("Remove tale.pdf").wait_for()
    page.reload()  # the draft survives
    expect_value(box, "read this")
    assert chips.locator("bdi").all_inner_texts() == ["poem.txt", "tale.pdf"]
    box.press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    assert name_of(page) == "read this"
    assert client.said("read this") == [
        "read this\n\npoem.txt:\n\n````\nroses\n```\nred\n````\n\n"
        "tale.pdf:\n\n````\nOnce upon\n\na time\n````"
    ]
    assert chips.count() == 0
    lines = page.locator(".user-message summary").all_inner_texts()
    assert lines == ["poem.txt · 3 lines", "tale.pdf · 3 lines"]
    page.get_by_text("poem.txt · 3 lines").click()
    page.locator(".user-message pre").get_by_text("roses").wait_for()


def test_a_dropped_file_is_attached(tab: Any) -> None:
    page = tab().page
    page.locator(".chat").evaluate(
        """(chat) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File(["roses"], "poem.txt", { type: "text/plain" }));
          const how = { dataTransfer, bubbles: true, cancelable: true };
          chat.dispatchEvent(new DragEvent("drop", how));
        }"""
    )
    page.get_by_label("Remove poem.txt").click()
    assert page.locator(".chips li").count() == 0


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------


def test_a_refused_message_returns_to_the_box(tab: Any, client: Any) -> None:
    page = tab().page
    ask(page, "hello")
    name, shown = name_of(page), answers(page)
    listed = page.request.get(f"{page.url.partition('#')[0]}v1/sessions").json()
    page.route("**/v1/sessions", lambda route: route.fulfill(json=listed))  # hides changes
    with client.answering(f"/{name}/answers", **ENDLESS):
        press(page, "Regenerate")
        page.get_by_text(f"session {name} is being answered").wait_for()
        page.get_by_role("button", name="Regenerate").wait_for()
    while client.ask("DELETE", f"/{name}").status == 409:  # until the answer has ended
        page.wait_for_timeout(50)
    send(page, "hello again")
    page.get_by_text("there is no session 1").wait_for()
    expect_value(box_of(page), "hello again")
    assert answers(page)[:1] == shown


def test_the_page_survives_a_killed_server(chromium: Any, model_path: Path, chats: None) -> None:
    budget = ("--ctx", 256, "--hh", 32, "--recent", 32)
    with ExitStack() as programs:

        def start(port: int) -> Any:
            program = serving.Program("--model", model_path, "--port", port, *budget)
            program.address()
            return programs.enter_context(program)

        running = start(0)
        open_tab = programs.enter_context(browsers.tabs(chromium, running.address()))
        page = open_tab().page
        ask(page, "before")
        shown = answers(page)
        running.process.kill()
        running.end()
        send(page, "after")
        page.get_by_text("the server does not respond: check that it is running").wait_for()
        expect_value(box_of(page), "after")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert answers(page) == shown
        start(running.port)
        box_of(page).press("Enter")
        page.locator(".turn").nth(1).wait_for()
        page.locator(f"{IDLE} .turn-actions").wait_for()
        now = answers(page)
        assert now[:1] == shown
        assert len(now) == 2
        page.reload()
        page.locator(".turn").nth(1).wait_for()
        assert answers(page) == now


def test_the_page_asks_for_the_api_key_once(
    serve: Callable[..., Any], chromium: Any, endless: None
) -> None:
    """It asks again if the key cannot be sent, for example with curly quotes."""
    with browsers.tabs(chromium, serve(api_key="secret").server.address) as open_tab:
        page = open_tab().page
        page.locator("dialog input").fill("\u201csecret\u201d")
        page.keyboard.press("Enter")
        page.get_by_text("This key contains a character that cannot be sent").wait_for()
        page.locator("dialog input").fill("secret")
        page.keyboard.press("Enter")
        ask(page, "hello")
        page.reload()
        page.locator(".turn").wait_for()
        assert page.locator("dialog").count() == 0


# ---------------------------------------------------------------------------------------------
# Sessions, settings and models
# ---------------------------------------------------------------------------------------------


def test_sessions_can_be_searched_renamed_exported_imported_and_deleted(
    tab: Any, client: Any, tmp_path: Path
) -> None:
    client.chat("whales", "about whales")
    page = tab().page
    page.keyboard.press("Control+Shift+O")
    page.get_by_role("heading", name="New chat").wait_for()
    ask(page, "about ships")
    ships = name_of(page)
    page.keyboard.press("Control+k")
    page.keyboard.type("whales")
    page.locator(".sessions a").get_by_text("about ships").wait_for(state="detached")
    assert page.locator(".sessions .first-words").all_inner_texts() == ["about whales so be it"]
    assert page.locator(".sessions mark").all_inner_texts() == ["whales"]
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="whales").wait_for()
    choose(page, "Rename")
    page.get_by_role("textbox", name="Name").fill("What's ä? (x & y)/z")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="What's ä? (x & y)/z").wait_for()
    choose(page, "Export")
    page.get_by_label("Format").select_option("json")
    with page.expect_download() as download:
        press(page, "Download")
    exported = tmp_path / "exported.json"
    download.value.save_as(exported)
    assert json.loads(exported.read_text())["turns"][0]["user"] == "about whales"
    page.get_by_label("Exported chats").set_input_files(exported)
    page.get_by_role("heading", name="What's ä? (x & y)/z (2)").wait_for()
    page.locator(".user-message").get_by_text("about whales").wait_for()
    choose(page, "Delete")
    page.locator("dialog").get_by_role("button", name="Delete").click()
    page.get_by_role("heading", name="New chat").wait_for()
    assert client.names() == sorted([ships, "What's ä? (x & y)/z"])


def test_chats_of_other_programs_can_be_imported(tab: Any, client: Any, tmp_path: Path) -> None:
    """A single chat is opened with its unanswered message in the box; several are counted."""
    page = tab().page
    picker = page.get_by_label("Exported chats")
    wrong, tavern, many = (tmp_path / name for name in ("a.txt", "b.jsonl", "conversations.json"))
    wrong.write_text("roses are red")
    picker.set_input_files(wrong)
    page.get_by_text("no chats found in this file: give a SillyTavern chat").wait_for()
    texts = [("Hello", True), ("Well met!", False), ("Who are you?", True)]
    head = {"character_name": "The Innkeeper"}
    lines = [{"mes": text, "is_user": is_user} for text, is_user in texts]
    tavern.write_text("\n".join(map(json.dumps, (head, *lines))))
    picker.set_input_files(tavern)
    page.get_by_role("heading", name="The Innkeeper").wait_for()
    expect_value(box_of(page), "Who are you?")
    assert client.said("The Innkeeper") == ["Hello"]

    def node(parent: str | None, role: str, text: str) -> dict[str, Any]:
        content = {"content_type": "text", "parts": [text]}
        return {"parent": parent, "message": {"author": {"role": role}, "content": content}}

    mapping = {"a": node(None, "user", "Hi"), "b": node("a", "assistant", "Hello!")}
    tree = {"title": "Greetings", "mapping": mapping, "current_node": "b"}
    many.write_text(json.dumps([tree, {**tree, "title": "Greetings"}]))
    picker.set_input_files(many)
    page.get_by_text("2 of 2 chats imported.").wait_for()
    assert client.names() == ["Greetings", "Greetings (2)", "The Innkeeper"]


def test_settings_are_sent_only_if_they_changed(tab: Any, client: Any) -> None:
    """A changed system prompt would make the server read the whole text again."""
    page = tab().page
    choose(page, "Settings")
    page.get_by_label("System prompt").fill("You are a sailor.")
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("Max tokens").fill("3")
    press(page, "Save")
    ask(page, "hello")
    first = client.got(f"/{name_of(page)}")
    assert first["system"] == "You are a sailor."
    assert first["sampling"]["temperature"] == 0.2
    assert first["turns_list"][0]["finish"] == "length"
    page.get_by_role("link", name="New chat").click()
    page.get_by_role("heading", name="New chat").wait_for()
    ask(page, "hello")
    assert client.got(f"/{name_of(page)}")["sampling"]["seed"] != first["sampling"]["seed"]
    prompt = "Hi.\r\nBe brief.\n"  # a textarea normalises its line breaks
    client.create("one", system=prompt)
    open_session(page, client, "one")
    page.get_by_role("heading", name="one").wait_for()
    choose(page, "Settings")
    page.get_by_label("Seed").fill("7")
    press(page, "Save")
    page.locator("dialog").wait_for(state="detached")
    page.wait_for_timeout(300)
    session = client.got("/one")
    assert (session["system"], session["sampling"]["seed"]) == (prompt, 7)


def test_the_chosen_model_starts_and_continues_a_chat(
    serve: Callable[..., Any], chromium: Any, endless: None, tmp_path: Path
) -> None:
    models = several.Loads(several.write_models(tmp_path)).models("first", "second")
    client = serve(models)
    with closing(models), browsers.tabs(chromium, client.server.address) as open_tab:
        page = open_tab().page
        chooser = page.get_by_title("Choose a model")

        def choose_model(name: str) -> None:
            chooser.click()
            page.locator(".models").get_by_role("button", name=name).click()

        choose_model("second")
        ask(page, "one")
        name = name_of(page)
        assert client.got(f"/{name}")["model"] == "second"
        choose_model("first")
        press(page, "Cancel")
        assert chooser.locator("bdi").inner_text() == "second"
        choose_model("first")
        press(page, "Change the model")
        page.locator("dialog").wait_for(state="detached")
        ask(page, "two")
        assert client.got(f"/{name}")["model"] == "first"
        assert chooser.locator("bdi").inner_text() == "first"


def test_the_list_explains_sessions_of_other_models_once(
    serve: Callable[..., Any], chromium: Any, tmp_path: Path
) -> None:
    loads = several.Loads(several.write_models(tmp_path))
    with closing(loads.models("first", "second")) as models:
        client = serve(models)
        for name, model in (("a", "first"), ("b", "first"), ("c", "second")):
            client.create(name, model=model)
    with closing(loads.models("second")) as models:
        client = serve(models)
        with browsers.tabs(chromium, client.server.address) as open_tab:
            page = open_tab().page
            page.locator("#sessions a .name").nth(2).wait_for()
            lines = page.locator("#sessions .sessions").inner_text()
            assert lines.count("made with first.gguf") == 2
            assert lines.count("open it and choose a model") == 1
            assert "this server does not have" not in lines
            style = "getComputedStyle(document.querySelector('.unusable .name')).textDecorationLine"
            assert page.evaluate(style) == "none"


# ---------------------------------------------------------------------------------------------
# Navigation and accessibility
# ---------------------------------------------------------------------------------------------


def test_a_phone_scrolls_only_vertically(tab: Any, client: Any) -> None:
    wide = "x" * 500
    table = f"| a | b |\n|---|---|\n| {wide} | b |"
    client.chat("one", wide, answer=f"{wide}\n\n```\n{wide}\n```\n\n{table}")
    page = tab(client.address("one"), **PHONE).page
    page.locator(".answer td").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.evaluate("document.querySelector('.scroller').scrollWidth") <= 375
    page.get_by_role("button", name="Chats and stories").tap()
    page.get_by_role("link", name=re.compile("^one")).tap()
    page.locator("#sessions:not(.open)").wait_for(state="attached")
    page.get_by_role("button", name="Memory").tap()
    page.locator(".strip canvas").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_the_page_works_with_the_keyboard_only(tab: Any, client: Any) -> None:
    page = tab().page
    page.locator("textarea:focus").wait_for()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    first = name_of(page)
    assert client.said(first) == ["first line\nsecond line"]
    for _ in range(20):  # backwards from the box
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Regenerate":
            break
    page.keyboard.press("Enter")
    page.get_by_text("2 of 2").wait_for()
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keyboard shortcuts").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="Keyboard shortcuts").wait_for(state="detached")
    page.keyboard.press("Control+Shift+O")
    page.get_by_role("heading", name="New chat").wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=first).wait_for()


def test_the_focus_returns_after_a_dialog(tab: Any) -> None:
    """The end of an answer moves no focus and closes no menu."""
    page = tab().page
    ask(page, "hello")
    more = page.get_by_label("More")
    for item, end in (("Settings", "Save"), ("Rename", "Cancel"), ("Keyboard shortcuts", "Close")):
        more.press("Enter")
        page.get_by_role("button", name=item, exact=True).press("Enter")
        page.get_by_role("dialog").get_by_role("button", name=end, exact=True).press("Enter")
        page.get_by_role("dialog").wait_for(state="detached")
        page.wait_for_timeout(200)
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "More", item
    set_max_tokens(page, 300)
    send(page, "and on")
    page.locator("body.generating").wait_for()
    more.press("Enter")
    page.get_by_role("button", name="Export", exact=True).focus()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    page.wait_for_timeout(200)
    assert page.evaluate("document.activeElement.textContent") == "Export"


def test_invalid_addresses_open_a_new_chat(tab: Any, client: Any) -> None:
    """An address without an id, and a deleted session."""
    for name in ("one", "two"):
        client.chat(name, f"in {name}")
    two = client.ids()["two"]
    page = tab(client.address("one")).page
    page.locator(".user-message").get_by_text("in one").wait_for()
    page.evaluate("location.hash = '#/s/50%'")
    page.get_by_role("heading", name="New chat").wait_for()
    open_session(page, client, "two")
    page.locator(".user-message").get_by_text("in two").wait_for()
    page.evaluate("location.hash = '#/new'")
    page.get_by_role("heading", name="New chat").wait_for()
    assert client.ask("DELETE", "/two").status == 204
    page.go_back()
    page.get_by_text(f"there is no session {two}").wait_for()
    page.get_by_role("heading", name="New chat").wait_for()
    open_session(page, client, "one")
    page.locator(".user-message").get_by_text("in one").wait_for()
    assert messages(page) == ["in one"]
