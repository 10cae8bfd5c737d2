"""`pyh2o chat`: other conversations are begun, listed and loaded within a chat."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from cli_fakes import run
from pyh2o.cli.chat import file_commands
from scripted_chat import RecordedConversation, ScriptedModel, answers_of, notes_of

pytestmark = pytest.mark.usefixtures("surroundings")


def begin(model: ScriptedModel, name: str, message: str) -> None:
    model.say("Hi")
    assert run("chat", "--session", name, stdin=f"{message}\n").code == 0


def test_sessions_are_listed_and_loaded(
    model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_commands, "LISTED", 2)
    assert notes_of(run("chat", stdin="/sessions\n")) == ["none is saved yet"]
    for name, message in (("old", "zero"), ("work", "one"), ("my plans", "two")):
        begin(model, name, message)
    for day, name in enumerate(("old", "work", "my plans")):
        os.utime(tmp_path / "chats" / f"{name}.h2o", (day * 86_400, day * 86_400))
    model.say("Ho")
    output = run("chat", "--session", "work", stdin="/sessions\n/load 1\nthree\n/load work\n")
    notes = notes_of(output)
    first, second = notes[1:3]
    assert first.startswith(" 1  my plans  1970-01-03 ")
    assert first.endswith("1 turn  two")
    assert second.startswith(" 2  work      1970-01-02 ")
    assert second.endswith("1 turn  one  (this one)")
    assert notes[3:5] == [
        "and 1 older one: pyh2o sessions list",
        "/load NAME, or its number here, goes on",
    ]
    n_plans = model.n_text(("two", "Hi"))
    assert notes[5:7] == [
        f"continuing a conversation of 1 turn, {n_plans} tokens",
        "this is session my plans",
    ]
    assert answers_of() == [("one", "Hi")]  # that was loaded last
    run("chat", "--session", "my plans")
    assert answers_of() == [("two", "Hi"), ("three", "Ho")]
    assert sorted(path.name for path in (tmp_path / "chats").iterdir()) == [
        "my plans.h2o", "old.h2o", "work.h2o"
    ]  # fmt: skip


def test_a_file_of_the_same_name_is_meant(model: ScriptedModel, tmp_path: Path) -> None:
    begin(model, "work", "one")
    begin(model, "2", "two")
    model.say("Hi")
    script = "three\n/save work\n/load work\n/sessions\n/load 2\n"
    notes = notes_of(run("chat", stdin=script))
    assert "this is the file work, not the session of that name" in notes
    assert notes[-1] == "this is session 2"  # and not the second one of the list
    assert answers_of() == [("two", "Hi")]


def test_sessions_that_cannot_be_loaded(model: ScriptedModel, tmp_path: Path) -> None:
    begin(model, "work", "one")
    begin(model, "plans", "two")
    (tmp_path / "chats" / "odd.h2o").write_text("damaged")
    model.say("Ho")
    with (tmp_path / "chats" / ".work.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = "/load work\n/load odd\n/load plans\nthree\n"
        notes = notes_of(run("chat", "--session", "plans", stdin=script))
    assert notes[1:] == [
        "error: session work is open in another chat: leave that one first, or give another "
        "--session",
        f"error: {tmp_path}/chats/odd.h2o is not a session file of pyh2o: check the name",
        "error: this is session plans already",
    ]
    assert answers_of() == [("two", "Hi"), ("three", "Ho")]
    assert run("sessions", "rm", "odd").code == 0  # it was let go again


def test_a_chat_that_is_not_saved_leaves_what_it_loads(
    model: ScriptedModel, tmp_path: Path
) -> None:
    begin(model, "work", "one")
    before = (tmp_path / "chats" / "work.h2o").read_bytes()
    model.say("Ho")
    run("chat", stdin="/load work\ntwo\n")
    assert answers_of() == [("one", "Hi"), ("two", "Ho")]
    assert RecordedConversation.last.saves == []
    assert (tmp_path / "chats" / "work.h2o").read_bytes() == before
