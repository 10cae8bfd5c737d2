"""Answers in progress are in the database, whenever the program ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archived_talk import RECALLING
from conversations import EVICTING, said, text_of
from pyh2o import Conversation, Llama
from pyh2o.core.text import Text
from pyh2o.sessions import text_session
from pyh2o.sessions.database import Database
from pyh2o.writing.sampling import Sampling
from tiny_llama import tiny_llama

SAMPLING = Sampling(temperature=1.2, top_k=0, seed=5, frequency_penalty=0.5)
LONG = "what was it? " * 12
ANSWERS: dict[str, Callable[[Conversation], Generator[str]]] = {
    "say": lambda talk: talk.say(LONG, max_tokens=40),
    "regenerate": lambda talk: talk.regenerate(max_tokens=40),
    "edit": lambda talk: talk.edit(LONG, max_tokens=40),
    "go_on": lambda talk: talk.go_on(max_tokens=40),
}


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(text_session, "SECONDS", 0.0)
    with Database(tmp_path / "chats.db") as database:
        yield database


def begun(llm: Llama, database: Database) -> Conversation:
    talk = Conversation(llm, sampling=SAMPLING)
    for message in ("hello", "and then?"):
        said(talk.say(message, max_tokens=20))
    talk.keep_in(database, "talk")
    return talk


def killed(database: Database, llm: Llama) -> Conversation:
    """Return the conversation that another program finds at this moment."""
    with Database(database.path) as other:
        (info,) = other.texts()
        talk = Conversation.open(other, info.id, llm)
        talk.place = None
        return talk


@pytest.mark.parametrize("settings", [EVICTING, RECALLING], ids=["evicting", "recalling"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_it_goes_on_where_it_was_cut(
    path: Path, database: Database, kind: str, settings: dict[str, Any]
) -> None:
    talk = begun(tiny_llama(path, **settings), database)
    n_turns = len(talk.turns) + (kind == "say")
    answer = ANSWERS[kind](talk)
    pieces = [next(answer) for _ in range(8)]
    talk_after = killed(database, tiny_llama(path, **settings))
    pieces += answer
    assert len(talk_after.turns) == n_turns
    cut, last = talk_after.turns[-1], talk.turns[-1]
    assert (cut.user, cut.finish, cut.attempt) == (last.user, "interrupted", last.attempt)
    assert cut.answer != ""
    assert last.answer.startswith(cut.answer)
    assert text_of(talk_after) == text_of(talk)[: cut.end]
    assert [kept.answer for kept in talk_after.answers[:-1]] == [
        kept.answer for kept in talk.answers[:-1]
    ]
    said(talk_after.go_on(max_tokens=last.end - cut.end))
    # nothing of the cache was of another text; tokens read together look for evicted rows together
    if kind in ("say", "go_on") and settings is EVICTING:
        assert replace(talk_after.turns[-1], finish="") == replace(last, finish="")
    talk.store()
    assert killed(database, tiny_llama(path, **settings)).turns == talk.turns


def test_a_message_that_is_being_read_stays(
    path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = begun(tiny_llama(path, **EVICTING), database)
    copies = []
    read = Text.read

    def copied(self: Text, *args: object, **kwargs: object) -> None:
        (info,) = database.texts()
        copies.append(database.copy(info.id, database))
        read(self, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Text, "read", copied)
        answer = said(talk.say(LONG, max_tokens=20))
    database.settle(copies[0])
    after = Conversation.open(database, copies[0], tiny_llama(path, **EVICTING))
    assert (after.turns[-1].user, after.turns[-1].answer) == (LONG, "")
    after.store()
    after = Conversation.open(database, copies[0], tiny_llama(path, **EVICTING))
    assert said(after.go_on(max_tokens=20)) == answer
    for kind in ("regenerate", "say"):
        after = Conversation.open(database, copies[0], tiny_llama(path, **EVICTING))
        next(ANSWERS[kind](after))
        after.store()
        again = Conversation.open(database, copies[0], tiny_llama(path, **EVICTING))
        assert again.turns == after.turns


def test_what_was_replaced_or_edited_stays_in_the_database(path: Path, database: Database) -> None:
    talk = begun(tiny_llama(path, **EVICTING), database)
    last = talk.turns[-1]
    for step in (
        lambda: said(talk.regenerate(max_tokens=20)),
        lambda: said(talk.edit("edited", max_tokens=20)),
        talk.undo,
        talk.clear,
        lambda: said(talk.say("new", max_tokens=20)),
    ):
        step()
        talk.store()
        assert killed(database, tiny_llama(path, **EVICTING)).answers == talk.answers
    for words in ("and then", "edited", "hello", last.answer[-8:]):
        assert database.search(words)


def test_the_kv_cache_is_stored_as_the_text_grows(path: Path, database: Database) -> None:
    talk = begun(tiny_llama(path, **EVICTING), database)
    assert talk.place is not None
    file = database.kv_file(talk.place.text)
    said(talk.say(LONG * 3, max_tokens=1))
    talk.store()
    first = file.read_bytes()
    said(talk.say("x", max_tokens=1))
    talk.store()
    assert file.read_bytes() == first
    said(talk.say(LONG * 3, max_tokens=1))
    talk.store()
    second = file.read_bytes()
    assert second != first
    said(talk.say("x", max_tokens=1))
    talk.store(leaving=True)
    assert file.read_bytes() != second
    loaded = Conversation.open(database, talk.place.text, tiny_llama(path, **EVICTING))
    assert len(loaded.unread) == 1
