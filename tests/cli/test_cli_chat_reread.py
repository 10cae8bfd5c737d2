"""`pyh2o chat --reread`: sessions of another model or other settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_fakes import run
from pyh2o.cli.chat import autosave
from pyh2o.errors import SessionError
from pyh2o.sessions.session_file import read_session, write_session
from scripted_chat import CHATS, ScriptedModel, answers_of, notes_of

pytestmark = pytest.mark.usefixtures("surroundings")

REFUSED = "this session was made with --recent 50, and the model is loaded with --recent 400"


def said_in(work: Path) -> list[tuple[str, str]]:
    """The turns of a session file."""
    turns = read_session(work, "conversation").header["turns"]
    return [(turn["user"], turn["answer"]) for turn in turns]


@pytest.fixture
def work(surroundings: None, model: ScriptedModel) -> Path:
    """A session that was made with another cache."""
    model.say("Hi")
    run("chat", "--session", "work", "-s", "Be kind.", stdin="Hello\n")
    path = CHATS / "work.h2o"
    session = read_session(path, "conversation")
    session.header["settings"] |= {"recent": 50}
    write_session(path, session)
    return path


def test_a_session_of_another_cache_is_refused_without_reread(
    model: ScriptedModel, work: Path
) -> None:
    before = work.read_bytes()
    output = run("chat", "--session", "work", stdin="Who?\n")
    assert (output.code, output.text) == (1, "")
    assert output.notes == (
        f"error: {REFUSED}: give the same settings, or start a new session; or read its text "
        "again (--reread)\n"
    )
    assert work.read_bytes() == before


def test_text_is_read_again_and_the_old_session_stays(model: ScriptedModel, work: Path) -> None:
    before = work.read_bytes()
    assert run("chat", "--session", "work", "--reread").code == 0
    assert list(work.parent.iterdir()) == [work]  # nothing was said
    (work.parent / "work.before.h2o").write_text("precious")
    assert work.read_bytes() == before
    model.say("Ho")
    output = run("chat", "--session", "work", "--reread", "--recent", "400", stdin="Who?\n")
    n_text = model.n_text(("Hello", "Hi"), system="Be kind.")
    assert notes_of(output) == [
        f"{n_text} tokens will be read again with the next message; the next save "
        "keeps the current session as work.before-2",
        f"continuing a conversation of 1 turn, {n_text} tokens",
    ]
    assert said_in(work) == [("Hello", "Hi"), ("Who?", "Ho")]
    assert (work.parent / "work.before-2.h2o").read_bytes() == before
    assert (work.parent / "work.before.h2o").read_text() == "precious"


def test_a_session_that_cannot_be_copied_is_not_replaced(
    model: ScriptedModel, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SessionError("no room for a copy")

    monkeypatch.setattr(autosave, "copy_session", fail)
    before = work.read_bytes()
    model.say("Ho")
    output = run("chat", "--session", "work", "--reread", stdin="Who?\n")
    assert (output.code, output.text) == (1, "Ho\n")
    assert "warning: this chat is not saved: no room for a copy" in output.notes
    assert work.read_bytes() == before


def test_a_full_cache_evicts_and_turns_stay_as_fair(model: ScriptedModel, work: Path) -> None:
    for reread in ([], ["--reread"]):
        output = run("chat", "--session", "work", "--fair-turns", *reread)
        assert "--fair-turns cannot be changed in this session, " in output.notes
    session = read_session(work, "conversation")
    session.header["settings"] |= {"evict": False}
    write_session(work, session)
    assert run("chat", "--session", "work", "--hh", "0.2", "--reread").code == 0
    assert model.options is not None
    assert (model.options.no_evict, model.options.eviction.hh) == (False, 0.2)


# -------------------------------------------------------------------------------------------------
# Within a chat
# -------------------------------------------------------------------------------------------------


def test_load_of_such_a_session_is_refused_with_the_cure(model: ScriptedModel, work: Path) -> None:
    before = work.read_bytes()
    model.say("a")
    output = run("chat", "--session", "here", stdin="one\n/load work\n")
    assert notes_of(output) == [
        f"error: {REFUSED}: give the same settings, or start a new session; or read its text "
        "again: /load work --reread"
    ]
    assert answers_of() == [("one", "a")]  # nothing is changed
    assert work.read_bytes() == before


@pytest.mark.parametrize("argument", ["work --reread", "2  --reread"])
def test_load_reads_the_text_again(model: ScriptedModel, work: Path, argument: str) -> None:
    before = work.read_bytes()
    model.say("a", "b", "Ho", "c")
    lines = ["one", "two " * 40, "/sessions", f"/load {argument}", "Who?", "/load here", "three"]
    output = run("chat", "--session", "here", stdin="\n".join(lines))
    n_text = model.n_text(("Hello", "Hi"), system="Be kind.")
    notes = notes_of(output)
    assert (
        f"{n_text} tokens will be read again with the next message; the next save "
        "keeps the current session as work.before"
    ) in notes
    assert said_in(work) == [("Hello", "Hi"), ("Who?", "Ho")]
    assert (work.parent / "work.before.h2o").read_bytes() == before
    assert said_in(work.parent / "here.h2o")[2:] == [("three", "c")]


@pytest.mark.parametrize("leave", ["/load here", "/clear"])
def test_a_reread_session_without_a_new_turn_has_no_copy(
    model: ScriptedModel, work: Path, leave: str
) -> None:
    """The next save is of another session, which has no old text."""
    before = work.read_bytes()
    model.say("a", "b")
    lines = f"one\n/load work --reread\n{leave}\ntwo\n"
    output = run("chat", "--session", "here", stdin=lines)
    assert output.code == 0, output.notes
    assert "not saved" not in output.notes
    assert work.read_bytes() == before
    assert ("two", "b") in [said_in(path)[-1] for path in work.parent.glob("*.h2o")]
    assert not list(work.parent.glob("*.before*"))


@pytest.mark.parametrize("saving", [["--session", "here"], ["--no-save"]])
def test_load_of_a_file_reads_its_text_again_and_leaves_it(
    model: ScriptedModel, work: Path, tmp_path: Path, saving: list[str]
) -> None:
    file = tmp_path / "my talk.h2o"
    work.rename(file)
    before = file.read_bytes()
    model.say("Ho")
    output = run("chat", *saving, stdin=f"/load {file} --reread\nWho?\n")
    assert (output.code, output.text) == (0, "Ho\n"), output.notes
    assert "before" not in output.notes
    assert file.read_bytes() == before
    assert answers_of() == [("Hello", "Hi"), ("Who?", "Ho")]
    assert len(list(work.parent.iterdir())) == (saving != ["--no-save"])
