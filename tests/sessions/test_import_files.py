"""Sessions and exports are imported into a database, and any model resumes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conversations import said
from pyh2o import Conversation, Llama
from pyh2o.errors import SessionError
from pyh2o.sessions.database import Database
from pyh2o.sessions.import_files import import_file
from pyh2o.sessions.listing import text_of
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

OLDER = Path(__file__).parent / "older_files"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return tiny_llama(
        write_chat_gguf(path, CHATML, n_layer=2), n_ctx=400, hh=60, recent=60, slack=40
    )


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "chats.db") as database:
        yield database


def imported(database: Database, file: Path, content: Any = None) -> list[int]:
    if content is not None:
        file.write_text(json.dumps(content), encoding="utf-8")
    return [text for text, _ in import_file(database, file)]


def test_an_exported_conversation_is_imported(
    llm: Llama, database: Database, tmp_path: Path
) -> None:
    talk = Conversation(llm, system="Be kind.", sampling=Sampling(seed=5, temperature=0.5))
    talk.note = "sad"
    said(talk.say("hello", max_tokens=5))
    said(talk.say("and then?", max_tokens=5))
    before = database.read(talk.keep_in(database, "talk"))
    (tmp_path / "talk.json").write_text(text_of(before, "json"), encoding="utf-8")
    (new,) = imported(database, tmp_path / "talk.json")
    assert database.info(new).title == "talk (2)"
    again = Conversation.open(database, new, llm)
    assert [(turn.user, turn.answer, turn.inserted) for turn in again.turns] == [
        (turn.user, turn.answer, turn.inserted) for turn in talk.turns
    ]
    assert (again.system, again.sampling, again.note) == ("Be kind.", talk.sampling, "sad")
    assert again.reread_reason == "it was imported"
    said(again.say("why?", max_tokens=5))
    again.store()
    assert Conversation.open(database, new, llm).turns == again.turns


def test_an_exported_story_is_imported(llm: Llama, database: Database, tmp_path: Path) -> None:
    tale = Story(llm, "Once upon", echo=True, memory="It rains.", sampling=Sampling(seed=3))
    tale.note = "sad"
    "".join(tale.write(20))
    before = database.read(tale.keep_in(database, "tale"))
    (tmp_path / "tale.json").write_text(text_of(before, "json"), encoding="utf-8")
    (new,) = imported(database, tmp_path / "tale.json")
    again = Story.open(database, new, llm)
    assert again.text() == tale.text()
    assert (again.memory, again.note, again.sampling) == ("It rains.", "sad", tale.sampling)
    more = "".join(again.write(5))
    again.store()
    assert Story.open(database, new, llm).text() == tale.text() + more


def test_chats_of_other_programs_are_imported(
    llm: Llama, database: Database, tmp_path: Path
) -> None:
    lines = [
        {"user_name": "Ann", "character_name": "Seraphina"},
        {"name": "Ann", "is_user": True, "mes": "Where am I?"},
        {"name": "Seraphina", "is_user": False, "mes": "In my glade."},
        {"name": "Ann", "is_user": True, "mes": "Why?"},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    [(text, unanswered)] = import_file(database, file)
    assert (database.info(text).title, unanswered) == ("Seraphina", "Why?")
    talk = Conversation.open(database, text, llm)
    assert [(turn.user, turn.answer) for turn in talk.turns] == [("Where am I?", "In my glade.")]
    said(talk.say("Why?", max_tokens=5))


def test_sessions_are_imported(llm: Llama, database: Database, tmp_path: Path) -> None:
    talk = Conversation(llm)
    said(talk.say("hello", max_tokens=5))
    talk.save(tmp_path / "talk.h2o")
    for file, reason in (
        (tmp_path / "talk.h2o", ""),  # with its KV cache
        (OLDER / "a talk.h2o", "its KV cache was not saved"),
    ):
        (text,) = imported(database, file)
        assert database.info(text).title == file.stem
        assert Conversation.open(database, text, llm).reread_reason == reason


EXPORT = {
    "format": "pyh2o export",
    "version": 1,
    "name": "talk",
    "kind": "conversation",
    "sampling": {},
    "system": None,
    "turns": [{"user": "Hello", "answer": "Hi", "finish": "stop"}],
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (EXPORT | {"version": 2}, "is damaged .its format version is 2"),
        (EXPORT | {"turns": [{"user": "Hello"}]}, "is damaged"),
        (EXPORT | {"turns": [{"user": 1, "answer": "Hi", "finish": "stop"}]}, "its user is 1"),
        (EXPORT | {"sampling": {"temperature": "hot"}}, "its temperature is 'hot'"),
        ({"turns": []}, "no chats found in this file"),
        (None, "cannot read .*: No such file"),
    ],
)
def test_damaged_files_are_refused(
    database: Database, tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(SessionError, match=message):
        imported(database, tmp_path / "x.json", content)
    assert database.texts() == []
