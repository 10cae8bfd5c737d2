"""`pyh2o sessions`: list, search, rename, remove, copy, export and import saved texts."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from cli_fakes import Output, run
from pyh2o.sessions.chats import open_chats
from pyh2o.sessions.story import Story
from scripted_chat import ScriptedModel, answers_of, held, titles

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def chats(model: ScriptedModel, tmp_path: Path) -> Path:
    """Return the folder of saved chats, which has one with the name work."""
    model.say("Hi")
    assert run("chat", "--session", "work", stdin="Hello\n").code == 0
    return tmp_path / "chats"


def test_sessions_are_listed_renamed_and_removed(model: ScriptedModel, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    empty = f"no saved sessions in {chats} yet: `pyh2o chat` saves each turn\n"
    assert run("sessions", "list") == Output(0, "", empty)
    model.say("a", "a")
    run("chat", "--session", "work", stdin="Hello\\\nyou\nWho?\n")
    with open_chats() as database:
        Story(model.llm, "Once the fox", echo=True).keep_in(database, f"{'word ' * 12}end")
    listed = run("sessions", "list")
    today = time.strftime("%Y-%m-%d")
    n_talk, n_tale = (
        model.n_text(("Hello\nyou", "a"), ("Who?", "a")),
        len(model.llm.tokenize(b"Once the fox")),
    )
    title = f"{'word ' * 11}wo..."
    assert re.sub(r" \d\d:\d\d ", " ", listed.text) == (
        f"{title}  story  {today}       {n_tale} tokens\n"
        f"{'work':{len(title)}}  chat   {today}       {n_talk} tokens  0.1 MiB cache\n"
    )
    assert listed.notes == f"2 in {chats / 'chats.db'}\n"
    assert run("sessions") == listed
    assert run("sessions", "rename", "work", "plans/2026?").notes == "renamed work to plans/2026?\n"
    assert run("sessions", "remove", "plans/2026?", "nope") == Output(
        1, "", "error: unknown session nope: see `pyh2o sessions list`\n"
    )
    assert "plans/2026?" in titles()
    assert run("sessions", "remove", "plans/2026?") == Output(0, "", "removed plans/2026?\n")
    assert titles() == [f"{'word ' * 12}end"]


def test_a_session_is_copied(model: ScriptedModel, chats: Path) -> None:
    assert run("sessions", "copy", "work", "my copy") == Output(0, "", "copied work to my copy\n")
    model.say("Ho")
    output = run("chat", "--session", "my copy", stdin="Who?\n")
    assert "again" not in output.notes  # the KV cache was copied, too
    assert answers_of() == [("Hello", "Hi"), ("Who?", "Ho")]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nope", "new"), "unknown session nope: see `pyh2o sessions list`"),
        (("work", "other"), "session other exists: give another name"),
        (("open", "new"), "session open is open in another chat: close that one first"),
    ],
)
def test_invalid_copies_are_refused(chats: Path, names: tuple[str, str], message: str) -> None:
    for name in ("other", "open"):
        run("sessions", "copy", "work", name)
    with held("open"):
        assert run("sessions", "copy", *names) == Output(1, "", f"error: {message}\n")


@pytest.mark.parametrize("cache", [(), ("--cache",)])
def test_an_exported_session_is_loaded_and_imported(
    model: ScriptedModel, chats: Path, cache: tuple[str, ...]
) -> None:
    exported = run("sessions", "export", "work", "exported.h2o", *cache)
    assert exported == Output(0, "", "exported work to exported.h2o\n")
    assert Path("exported.h2o.kv").exists() == bool(cache)
    model.say("Ho")
    n_text = model.n_text(("Hello", "Hi"))
    again = f"{n_text} tokens will be read again with the next message (its KV cache was not saved)"
    output = run("chat", stdin="/load exported.h2o\nWho?\n")
    assert (output.text, again in output.notes) == ("Ho\n", not cache)
    run("sessions", "export", "work", "work.json")
    output = run("sessions", "import", "exported.h2o", "work.json")
    assert output.notes == (
        "imported work (2) from exported.h2o\nimported work (3) from work.json\n"
    )
    for name in ("work (2)", "work (3)"):
        model.say("Ho")
        run("chat", "--session", name, stdin="Who?\n")
        assert answers_of() == [("Hello", "Hi"), ("Who?", "Ho")]


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("work", "precious", "precious exists: give another name"),
        ("work", ".", ". exists: give another name"),
        ("work", "nowhere/new", "cannot use the session file nowhere/new: No such file"),
        ("open", "new", "session open is open in another chat: close that one first"),
        ("work", "new.md", "new.md has no cache, as it is exported as markdown: remove --cache"),
    ],
)
def test_invalid_exports_are_refused(chats: Path, name: str, file: str, message: str) -> None:
    run("sessions", "copy", "work", "open")
    Path("precious").write_text("old")
    with held("open"):
        cache = ["--cache"] if file == "new.md" else []
        output = run("sessions", "export", *cache, "--", name, file)
    assert (output.code, output.text, output.notes.count("\n")) == (1, "", 1)
    assert output.notes.startswith(f"error: {message}")
    assert sorted(path.name for path in Path().iterdir()) == ["chats", "precious"]
    assert Path("precious").read_text() == "old"


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
def test_messages_are_exported_as_text(tmp_path: Path, name: str, form: str, expected: str) -> None:
    assert run("sessions", "export", "talk", name) == Output(
        0, "", f"exported talk to {name} as {form}\n"
    )
    assert (tmp_path / name).read_text(encoding="utf-8") == expected
    assert run("sessions", "export", "talk", name) == Output(
        1, "", f"error: {name} exists: give another name\n"
    )


@pytest.mark.usefixtures("talk")
def test_messages_are_exported_as_json() -> None:
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
def test_messages_are_exported_to_standard_output() -> None:
    assert run("sessions", "export", "talk", "-") == Output(0, TEXT, "")


@pytest.mark.usefixtures("talk")
def test_search_finds_messages_and_stories_that_have_all_words(model: ScriptedModel) -> None:
    model.say("Nothing", "The answer is 42")
    run("chat", "--session", "deep", stdin=f"one\nThe question {'word ' * 30}\n")
    story = Story(model.llm, "Once the fox", echo=True)
    with open_chats() as database:
        story.keep_in(database, "tale")
    assert run("sessions", "search", "HELLO  you") == Output(
        0, "talk  Hello you Hi there\n", "1 found\n"
    )
    assert run("sessions", "search", "i").notes == "4 found\n"
    output = run("sessions", "search", "42", "question")
    assert output.text == f"deep  ...{'word ' * 3}The answer is 42\n"
    assert run("sessions", "search", "Ünique").text == "talk  Who? # Ünique\n"
    assert run("sessions", "search", "fox").text == "tale  Once the fox\n"
    assert run("sessions", "search", "nobody") == Output(0, "", "0 found\n")
