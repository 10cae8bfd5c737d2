"""`pyh2o chat`: saves that fail, /save, /clear, and the sessions and files that /load takes."""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cli_fakes import Output, run
from pyh2o.errors import SessionError
from pyh2o.sessions.session_file import read_session, write_session
from scripted_chat import CHATS, RecordedConversation, Script, ScriptedModel, answers_of, notes_of

pytestmark = pytest.mark.usefixtures("surroundings")


def test_a_folder_that_cannot_be_written_is_told(model: ScriptedModel) -> None:
    CHATS.write_text("a file")
    output = run("chat", "--session", "work", stdin="Hello\n")
    assert output == Output(
        1,
        "",
        f"error: cannot write to {CHATS.absolute()} (File exists): make it writable, set "
        "PYH2O_CHATS to another folder, or give --no-save\n",
    )


def fail_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: RecordedConversation, _path: Path) -> None:
        raise SessionError("cannot save the session: the disk is full")

    monkeypatch.setattr(RecordedConversation, "save", full)


FAILURE = "this chat is not saved: cannot save the session: the disk is full"


def test_failing_saves_are_said_once(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    save = RecordedConversation.save
    model.answers.extend(Script(["a"]) for _ in range(4))
    model.answers[2].pieces.append(lambda: monkeypatch.setattr(RecordedConversation, "save", save))
    fail_to_save(monkeypatch)
    output = run("chat", "--session", "work", stdin="one\ntwo\n/save\nthree\n/save\nfour\n")
    assert (output.code, output.text) == (1, "a\n" * 4)  # a command could not be done
    assert notes_of(output) == [
        f"warning: {FAILURE}",
        f"error: {FAILURE}; /save FILE saves a copy elsewhere",
        "saved as work",
    ]


@pytest.mark.parametrize("command", ["/clear", "/load copy.h2o"])
def test_conversation_that_cannot_be_saved_is_not_left(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    model.say("Hi")
    run("chat", stdin="zero\n/save copy.h2o\n")
    fail_to_save(monkeypatch)
    model.say("Hi", "Ho")
    output = run("chat", "--session", "work", stdin=f"Hello\n{command}\nWho?\n")
    assert output.code == 1
    assert notes_of(output) == [
        f"warning: {FAILURE}",
        f"error: {FAILURE}; /save FILE saves a copy elsewhere",
    ]
    assert answers_of() == [("Hello", "Hi"), ("Who?", "Ho")]


def test_clear_begins_a_new_conversation_and_the_old_one_stays(model: ScriptedModel) -> None:
    codes: list[int] = []

    def look_at_the_old_one() -> None:
        codes.append(run("sessions", "copy", "my work", "copy").code)  # it is open nowhere

    model.answers.extend([Script(["Hi"]), Script([look_at_the_old_one, "Ho"])])
    arguments = ["--session", "my work", "-s", "Be kind."]
    output = run("chat", *arguments, stdin="Hello\n/clear\nWho?\n")
    assert notes_of(output) == [
        "a new conversation starts; `pyh2o chat --session 'my work'` resumes the previous "
        "one; the system prompt stays"
    ]
    assert answers_of() == [("Who?", "Ho")]
    assert RecordedConversation.last.system == "Be kind."
    assert (codes, len(list(CHATS.iterdir()))) == ([0], 3)
    run("chat", "-c")
    assert answers_of() == [("Who?", "Ho")]
    run("chat", "--session", "my work")
    assert answers_of() == [("Hello", "Hi")]


def test_save_writes_copies_and_load_goes_on_from_them(model: ScriptedModel) -> None:
    model.say(*["a"] * 4)
    Path("precious.txt").write_text("old")
    script = ["one", "two", "/save copy.h2o", "three", "/save precious.txt"]
    output = run("chat", stdin="\n".join([*script, "/load copy.h2o", "four"]))
    assert (output.code, output.text) == (1, "a\n" * 4)
    n_text = model.n_text(("one", "a"), ("two", "a"))
    assert notes_of(output) == [
        "saved to copy.h2o: /load resumes it",
        "error: precious.txt exists: give another name",
        f"continuing a conversation of 2 turns, {n_text} tokens",
    ]
    assert [turn.user for turn in RecordedConversation.last.turns] == ["one", "two", "four"]
    assert Path("precious.txt").read_text() == "old"
    assert sorted(path.name for path in Path().iterdir()) == ["copy.h2o", "precious.txt"]


def test_loading_leaves_the_session_as_it_is(model: ScriptedModel) -> None:
    model.say(*["a"] * 4)
    run("chat", stdin="one\n/save copy.h2o\n")
    run("chat", "--session", "work", stdin="two\n/load copy.h2o\nthree\n")
    names = sorted(path.name for path in CHATS.iterdir())
    assert len(names) == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}\.h2o", names[0])
    run("chat", "--session", "work")
    assert [turn.user for turn in RecordedConversation.last.turns] == ["two"]
    run("chat", "--session", names[0].removesuffix(".h2o"))
    assert [turn.user for turn in RecordedConversation.last.turns] == ["one", "three"]
    run("chat", "--session", "empty", stdin="/load copy.h2o\n")
    assert sorted(path.name for path in CHATS.iterdir()) == [
        names[0],
        "empty.h2o",
        names[1],
    ]


def test_loading_that_fails_changes_nothing(model: ScriptedModel) -> None:
    model.say(*["a"] * 3)
    run("chat", stdin="zero\n/save copy.h2o\n")
    whole = read_session("copy.h2o", "conversation")
    write_session("damaged.h2o", replace(whole, tokens=whole.tokens[1:]))
    output = run("chat", stdin="one\n/load damaged.h2o\ntwo\n")
    assert (output.code, output.text) == (1, "a\na\n")
    assert notes_of(output) == [
        "error: the session file damaged.h2o is damaged (its turns do not end where its text "
        "ends): use another copy of it, or start a new session"
    ]
    assert answers_of() == [("one", "a"), ("two", "a")]


# -------------------------------------------------------------------------------------------------
# Other sessions
# -------------------------------------------------------------------------------------------------


def begin(model: ScriptedModel, name: str, message: str) -> None:
    model.say("Hi")
    assert run("chat", "--session", name, stdin=f"{message}\n").code == 0


def test_sessions_are_listed_and_loaded(model: ScriptedModel) -> None:
    assert notes_of(run("chat", stdin="/sessions\n")) == ["no saved sessions yet"]
    for name, message in (("old", "zero"), ("work", "one"), ("my plans", "two")):
        begin(model, name, message)
    for day, name in enumerate(("old", "work", "my plans")):
        os.utime(CHATS / f"{name}.h2o", (day * 86_400, day * 86_400))
    model.say("Ho")
    output = run("chat", "--session", "work", stdin="/sessions\n/load 1\nthree\n/load work\n")
    notes = notes_of(output)
    first, second = notes[1:3]
    assert first.startswith(" 1  my plans  1970-01-03 ")
    assert first.endswith("1 turn  two")
    assert second.startswith(" 2  work      1970-01-02 ")
    assert second.endswith("1 turn  one  (this one)")
    assert notes[3].startswith(" 3  old ")
    assert notes[4] == "/load NAME or /load NUMBER resumes one"
    n_plans = model.n_text(("two", "Hi"))
    assert notes[5:7] == [
        f"continuing a conversation of 1 turn, {n_plans} tokens",
        "this is session my plans",
    ]
    assert answers_of() == [("one", "Hi")]  # that was loaded last
    run("chat", "--session", "my plans")
    assert answers_of() == [("two", "Hi"), ("three", "Ho")]
    assert sorted(path.name for path in CHATS.iterdir()) == [
        "my plans.h2o", "old.h2o", "work.h2o"
    ]  # fmt: skip


def test_a_file_of_the_same_name_is_meant(model: ScriptedModel) -> None:
    begin(model, "work", "one")
    begin(model, "2", "two")
    model.say("Hi")
    script = "three\n/save work\n/load work\n/sessions\n/load 2\n"
    notes = notes_of(run("chat", stdin=script))
    assert "this is the file work, not the session of that name" in notes
    assert notes[-1] == "this is session 2"  # and not the second one of the list
    assert answers_of() == [("two", "Hi")]


def test_sessions_that_cannot_be_loaded(model: ScriptedModel) -> None:
    begin(model, "work", "one")
    begin(model, "plans", "two")
    (CHATS / "odd.h2o").write_text("damaged")
    model.say("Ho")
    with (CHATS / ".work.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = "/load work\n/load odd\n/load plans\nthree\n"
        notes = notes_of(run("chat", "--session", "plans", stdin=script))
    assert notes[1:] == [
        "error: session work is open in another chat: close that one first, or give another "
        "--session",
        f"error: {CHATS.absolute()}/odd.h2o is not a session file of pyh2o: check the name",
        "error: session plans is already open in this chat",
    ]
    assert answers_of() == [("two", "Hi"), ("three", "Ho")]
    assert run("sessions", "rm", "odd").code == 0  # it was let go again
