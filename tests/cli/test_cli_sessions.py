"""`pyh2o sessions`: what is saved is listed, copied, exported and removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from cli_fakes import Output, run
from pyh2o.sessions.story import Story
from scripted_chat import CHATS, ScriptedModel, answers_of

pytestmark = pytest.mark.usefixtures("surroundings")


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by their names."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def chats(model: ScriptedModel, tmp_path: Path) -> Path:
    """The folder of saved chats, with one that is called work."""
    model.say("Hi")
    assert run("chat", "--session", "work", stdin="Hello\n").code == 0
    return tmp_path / "chats"


def test_sessions_are_listed_and_removed(model: ScriptedModel, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    empty = f"no saved sessions in {chats} yet: `pyh2o chat` saves each turn\n"
    assert run("sessions", "list") == Output(0, "", empty)
    model.say(*["a"] * 3)
    run("chat", "--session", "work", stdin="Hello\\\nyou\nWho?\n")
    run("chat", "--session", "2026-01-01-120000", stdin=f"{'word ' * 20}\n")
    (chats / "odd.h2o").touch()
    (chats / ".history").touch()
    (chats / "work.h2o.archive").write_bytes(bytes(2_000_000))
    (chats / "work.h2o.archive.0a1b2c3d.new").touch()
    for day, name in enumerate(("odd", "2026-01-01-120000", "work"), start=1):
        seconds = datetime(1970, 1, day).timestamp()  # in the zone of this machine
        os.utime(chats / f"{name}.h2o", (seconds, seconds))
    listed = run("sessions", "list")
    sizes = [(chats / f"{name}.h2o").stat().st_size / 1e6 for name in ("work", "2026-01-01-120000")]
    assert sizes[0] > 0.05
    sizes[0] += 2
    assert listed.text == (
        f"work               1970-01-03 00:00  {sizes[0]:>7.1f} MB    2 turns  Hello you\n"
        f"2026-01-01-120000  1970-01-02 00:00  {sizes[1]:>7.1f} MB     1 turn  "
        f"{'word ' * 11}wo...\n"
        f"odd                1970-01-01 00:00      0.0 MB  {chats}/odd.h2o is not a session file "
        "of pyh2o: check the name\n"
    )
    assert listed.notes == f"3 in {chats}, {sum(sizes):.1f} MB\n"
    assert run("sessions") == listed
    assert run("sessions", "rm", "work", "nope") == Output(
        1, "", "error: unknown session nope: see `pyh2o sessions list`\n"
    )
    assert (chats / "work.h2o").exists()
    assert run("sessions", "rm", "work", "odd") == Output(0, "", "removed work\nremoved odd\n")
    assert sorted(path.name for path in chats.iterdir()) == [".history", "2026-01-01-120000.h2o"]


def test_a_folder_that_cannot_be_read_is_not_empty(
    chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after `sudo pyh2o chat`."""

    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    refused = Output(1, "", f"error: {chats}: Permission denied\n")
    assert run("sessions", "list") == refused
    assert run("sessions", "search", "word") == refused


def test_a_session_is_copied(chats: Path) -> None:
    before = contents(chats)["work.h2o"]
    assert run("sessions", "copy", "work", "my copy") == Output(0, "", "copied work to my copy\n")
    assert contents(chats) == {"work.h2o": before, "my copy.h2o": before}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nope", "new"), "unknown session nope: see `pyh2o sessions list`"),
        (("work", "other"), "session other exists: give another name"),
        (("a/b", "new"), "'a/b' is not a valid session name: "),
        (("damaged", "new"), "{chats}/damaged.h2o is not a session file of pyh2o: check the name"),
        (("open", "new"), "session open is open in another chat: close that one first"),
        (("work", "begun"), "session begun is open in another chat: close that one first"),
    ],
)
def test_copies_that_are_refused(chats: Path, names: tuple[str, str], message: str) -> None:
    for name in ("other", "open"):
        run("sessions", "copy", "work", name)
    (chats / "damaged.h2o").touch()
    with (chats / ".open.lock").open("w") as one, (chats / ".begun.lock").open("w") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(two, fcntl.LOCK_EX)
        before = contents(chats)
        output = run("sessions", "copy", *names)
        assert contents(chats) == before
    assert (output.code, output.text, output.notes.count("\n")) == (1, "", 1)
    assert output.notes.startswith(f"error: {message.format(chats=chats)}")


def test_an_exported_session_goes_on_by_load(model: ScriptedModel, chats: Path) -> None:
    """The file is the one that the chat itself would write."""
    run("chat", "--session", "work", stdin="/save saved.h2o\n")
    assert run("sessions", "export", "work", "exported.h2o") == Output(
        0, "", "exported work to exported.h2o: resume it with /load\n"
    )
    assert Path("exported.h2o").read_bytes() == Path("saved.h2o").read_bytes()
    assert list(contents(chats)) == ["work.h2o"]
    run("sessions", "rm", "work")
    model.say("Ho")
    assert run("chat", stdin="/load exported.h2o\nWho?\n").text == "Ho\n"
    assert answers_of() == [("Hello", "Hi"), ("Who?", "Ho")]


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("work", "precious", "precious exists: give another name"),
        ("work", ".", ". exists: give another name"),
        ("work", "other", "{folder}/other.archive exists: give another name"),
        ("work", "nowhere/new", "cannot save the session to nowhere/new: No such file"),
        ("open", "new", "session open is open in another chat: close that one first"),
    ],
)
def test_exports_that_are_refused(
    chats: Path, tmp_path: Path, name: str, file: str, message: str
) -> None:
    run("sessions", "copy", "work", "open")
    for each in ("precious", "other.archive"):
        Path(each).write_text("old")
    with (chats / ".open.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = run("sessions", "export", "--", name, file)
    assert (output.code, output.text, output.notes.count("\n")) == (1, "", 1)
    assert output.notes.startswith(f"error: {message.format(folder=tmp_path)}")
    assert sorted(path.name for path in Path().iterdir()) == [
        "chats",
        "other.archive",
        "precious",
    ]
    assert (Path("precious").read_text(), Path("other.archive").read_text()) == ("old", "old")


# -------------------------------------------------------------------------------------------------
# What was said
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def talk(surroundings: None, model: ScriptedModel) -> None:
    """A session of two turns."""
    model.say("Hi there\n", "# Ünique\n\n*yes*")
    arguments = ["--session", "talk", "-s", "Be kind.", "--seed", "7", "-n", "10"]
    assert run("chat", *arguments, stdin="Hello\\\nyou\nWho?\n").code == 0


TEXT = """(Be kind.)

> Hello
you

Hi there

> Who?

# Ünique
"""
MARKDOWN = """# talk

> Be kind.

**You:** Hello
you

Hi there

**You:** Who?

# Ünique
"""


@pytest.mark.usefixtures("talk")
@pytest.mark.parametrize(
    ("name", "form", "expected"), [("a.txt", "text", TEXT), ("a.MD", "markdown", MARKDOWN)]
)
def test_export_of_what_was_said(tmp_path: Path, name: str, form: str, expected: str) -> None:
    assert run("sessions", "export", "talk", name) == Output(
        0, "", f"exported talk to {name} as {form}\n"
    )
    assert (tmp_path / name).read_text(encoding="utf-8") == expected
    assert run("sessions", "export", "talk", name) == Output(
        1, "", f"error: {name} exists: give another name\n"
    )


@pytest.mark.usefixtures("talk")
def test_export_for_programs() -> None:
    assert run("sessions", "export", "talk", "a.json").code == 0
    about = json.loads(Path("a.json").read_text(encoding="utf-8"))
    sampling = about.pop("sampling")
    assert (sampling["seed"], sampling["temperature"]) == (7, 0.8)
    assert about == {
        "format": "pyh2o export",
        "version": 1,
        "name": "talk",
        "kind": "conversation",
        "system": "Be kind.",
        "turns": [
            {"user": "Hello\nyou", "answer": "Hi there\n", "finish": "stop"},
            {"user": "Who?", "answer": "# Ünique\n", "finish": "length"},
        ],
    }


@pytest.mark.usefixtures("talk")
def test_export_to_standard_output() -> None:
    assert run("sessions", "export", "talk", "-") == Output(0, TEXT, "")


@pytest.mark.usefixtures("talk")
def test_search_finds_turns_that_have_all_words(model: ScriptedModel) -> None:
    model.say("Nothing", "The answer is 42")
    run("chat", "--session", "deep", stdin=f"one\nThe question {'word ' * 30}\n")
    (CHATS / "odd.h2o").touch()
    assert run("sessions", "search", "HELLO  you") == Output(
        0, "talk  turn 1  Hello you Hi there\n", "1 found\n"
    )
    assert run("sessions", "search", "i") == Output(
        0,
        f"deep  turn 1  one Nothing\ndeep  turn 2  The question {'word ' * 8}word...\n"
        "talk  turn 1  Hello you Hi there\ntalk  turn 2  Who? # Ünique\n",
        "4 found\n",
    )
    output = run("sessions", "search", "42", "question")
    assert output.text == f"deep  turn 2  ...{'word ' * 3}The answer is 42\n"
    assert run("sessions", "search", "Ünique").text == "talk  turn 2  Who? # Ünique\n"
    assert run("sessions", "search", "nobody") == Output(0, "", "0 found\n")


# -------------------------------------------------------------------------------------------------
# Stories
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def tale(surroundings: None, model: ScriptedModel) -> None:
    """A story as the server saves it."""
    CHATS.mkdir(exist_ok=True)
    story = Story(model.llm, "Once upon a time", echo=True)
    "".join(story.write(20))
    story.notes = {"text": "Once upon a time\n\nthe fox slept.\nThe FOX woke,\n", "passages": [16]}
    story.save(CHATS / "tale.h2o")


@pytest.mark.usefixtures("talk", "tale")
def test_search_in_stories(model: ScriptedModel) -> None:
    assert run("sessions", "search", "fox") == Output(
        0,
        "tale  paragraph 2  the fox slept.\ntale  paragraph 3  The FOX woke,\n",
        "2 found\n",
    )
    assert run("sessions", "search", "o").notes == "5 found\n"  # in messages, too


@pytest.mark.usefixtures("tale")
def test_copy_of_a_story(tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    assert run("sessions", "copy", "tale", "other") == Output(0, "", "copied tale to other\n")
    assert contents(chats)["other.h2o"] == contents(chats)["tale.h2o"]
    assert run("sessions", "export", "other", "file.h2o").code == 0
    assert Path("file.h2o").read_bytes() == contents(chats)["tale.h2o"]
