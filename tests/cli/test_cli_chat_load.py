"""`pyh2o chat`: failing saves, /save, /clear, and the sessions and files that /load opens."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from cli_fakes import Output, run
from pyh2o.errors import SessionError
from scripted_chat import (
    CHATS,
    Person,
    RecordedConversation,
    Script,
    ScriptedModel,
    answers_of,
    chat_with,
    held,
    notes_of,
    titles,
)

pytestmark = pytest.mark.usefixtures("surroundings")


def start(model: ScriptedModel, name: str, message: str) -> None:
    """Save a session with a message."""
    model.say("Hi")
    assert run("chat", "--session", name, stdin=f"{message}\n").code == 0


# -------------------------------------------------------------------------------------------------
# Saves that fail
# -------------------------------------------------------------------------------------------------

FAILURE = "this chat is not saved: cannot use the session file: disk full"


def fail_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: RecordedConversation, **_: Any) -> None:
        raise SessionError("cannot use the session file: disk full")

    monkeypatch.setattr(RecordedConversation, "store", full)


def test_a_folder_that_is_not_writable_is_reported(model: ScriptedModel) -> None:
    CHATS.write_text("a file")
    message = (
        f"cannot write to {CHATS.absolute()} (File exists): make it writable, or set PYH2O_CHATS "
        "to another folder"
    )
    expected = Output(1, "", f"error: {message}\n")
    assert run("chat", "--session", "work", stdin="Hello\n") == expected


def test_a_failing_save_is_reported_once(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RecordedConversation.store
    model.answers.extend(Script(["a"]) for _ in range(4))
    model.answers[2].pieces.append(
        lambda: monkeypatch.setattr(RecordedConversation, "store", store)
    )
    fail_to_save(monkeypatch)
    output = run("chat", "--session", "work", stdin="one\ntwo\n/save\nthree\n/save\nfour\n")
    assert (output.code, output.text) == (1, "a\n" * 4)  # a command failed
    assert notes_of(output) == [
        f"warning: {FAILURE}",
        f"error: {FAILURE}; /save FILE saves a copy elsewhere",
        "saved as work",
    ]


@pytest.mark.parametrize("command", ["/clear", "/load copy.h2o"])
def test_a_conversation_that_cannot_be_saved_stays_open(
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


# -------------------------------------------------------------------------------------------------
# Titles, /clear, /save and /load
# -------------------------------------------------------------------------------------------------


def test_an_unnamed_chat_gets_its_first_words_as_title(model: ScriptedModel) -> None:
    model.say("Hi", "Ho", "Ha")
    title = "What's the capital? (France & Spain)/x"
    output = chat_with(Person(f"{title}\nWho?\n"))
    assert output.notes.endswith(f"saved as {title}: pyh2o chat -c resumes it\n")
    chat_with(Person(f"{title}\n"))
    assert titles() == [title, f"{title} (2)"]


def test_clear_starts_a_new_conversation_and_the_old_one_stays(model: ScriptedModel) -> None:
    codes: list[int] = []

    def copy_the_old_one() -> None:
        codes.append(run("sessions", "copy", "my work", "copy").code)  # it is not open any more

    model.answers.extend([Script(["Hi"]), Script([copy_the_old_one, "Ho"])])
    arguments = ["--session", "my work", "-s", "Be kind."]
    output = run("chat", *arguments, stdin="Hello\n/clear\nWho?\n")
    assert notes_of(output) == [
        "a new conversation starts; `pyh2o chat --session 'my work'` resumes the previous "
        "one; the system prompt stays"
    ]
    assert answers_of() == [("Who?", "Ho")]
    assert RecordedConversation.last.system == "Be kind."
    assert (codes, titles()) == ([0], ["Who?", "copy", "my work"])
    run("chat", "--session", "my work")
    assert answers_of() == [("Hello", "Hi")]


def test_save_writes_a_copy_and_load_resumes_it(model: ScriptedModel) -> None:
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


def test_a_loaded_file_becomes_a_new_session(model: ScriptedModel) -> None:
    model.say(*["a"] * 3)
    run("chat", stdin="one\n/save copy.h2o\n")
    run("chat", "--session", "work", stdin="two\n/load copy.h2o\nthree\n")
    assert titles() == ["one", "work"]
    run("chat", "--session", "work")
    assert [turn.user for turn in RecordedConversation.last.turns] == ["two"]
    run("chat", "--session", "one")
    assert [turn.user for turn in RecordedConversation.last.turns] == ["one", "three"]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("damaged.h2o", "the session file damaged.h2o is damaged (its turns do not end where"),
        ("text.h2o", "text.h2o is not a session file of pyh2o: check the name"),
        ("none.h2o", "no session or file none.h2o: /sessions lists the sessions"),
    ],
)
def test_a_load_that_fails_changes_nothing(model: ScriptedModel, file: str, reason: str) -> None:
    older = Path(__file__).parents[1] / "sessions" / "older_files" / "a talk.h2o"
    with zipfile.ZipFile(older) as old, zipfile.ZipFile("damaged.h2o", "w") as new:
        new.writestr("header.json", old.read("header.json"))
        new.writestr("tokens.bin", old.read("tokens.bin")[4:])
    Path("text.h2o").write_text("damaged")
    model.say("a", "a")
    output = run("chat", stdin=f"one\n/load {file}\ntwo\n")
    assert (output.code, output.text) == (1, "a\na\n")
    [note] = notes_of(output)
    assert note.startswith(f"error: {reason}")
    assert answers_of() == [("one", "a"), ("two", "a")]


# -------------------------------------------------------------------------------------------------
# Other sessions
# -------------------------------------------------------------------------------------------------


def test_sessions_are_listed_and_loaded(model: ScriptedModel) -> None:
    assert notes_of(run("chat", stdin="/sessions\n")) == ["no saved sessions yet"]
    for name, message in (("old", "zero"), ("work", "one"), ("my plans", "two")):
        start(model, name, message)
    model.say("Ho")
    script = "/sessions\n/load 1\nthree\n/load work\n"
    notes = notes_of(run("chat", "--session", "work", stdin=script))
    assert [line.split("  chat ")[0] for line in notes[1:4]] == [
        " 1  my plans", " 2  work    ", " 3  old     "
    ]  # fmt: skip
    assert notes[2].endswith("  (this one)")
    n_plans = model.n_text(("two", "Hi"))
    assert notes[4:7] == [
        "/load NAME or /load NUMBER resumes one",
        f"continuing a conversation of 1 turn, {n_plans} tokens",
        "this is session my plans",
    ]
    assert answers_of() == [("one", "Hi")]  # the last loaded one
    run("chat", "--session", "my plans")
    assert answers_of() == [("two", "Hi"), ("three", "Ho")]
    assert titles() == ["my plans", "old", "work"]


def test_a_file_comes_before_a_session_of_the_same_name(model: ScriptedModel) -> None:
    start(model, "work", "one")
    start(model, "2", "two")
    model.say("Hi")
    script = "three\n/save work\n/load work\n/sessions\n/load 2\n"
    notes = notes_of(run("chat", stdin=script))
    assert "this is the file work, not the session of that name" in notes
    assert notes[-1] == "this is session 2"  # not the second one of the list
    assert answers_of() == [("two", "Hi")]


def test_a_session_that_is_open_is_not_loaded(model: ScriptedModel) -> None:
    start(model, "work", "one")
    start(model, "plans", "two")
    model.say("Ho")
    with held("work"):
        script = "/load work\n/load plans\nthree\n"
        notes = notes_of(run("chat", "--session", "plans", stdin=script))
    assert notes[1:] == [
        "error: session work is open in another chat: close that one first",
        "error: session plans is already open in this chat",
    ]
    assert answers_of() == [("two", "Hi"), ("three", "Ho")]
