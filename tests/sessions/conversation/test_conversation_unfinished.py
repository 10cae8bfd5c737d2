"""Answers that end with their program: both message and answer are in the session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archived_talk import RECALLING
from conversations import EVICTING, said, text_of
from pyh2o import Conversation, Llama
from pyh2o.core.text import Text
from pyh2o.errors import SessionError
from pyh2o.sessions import unfinished
from pyh2o.sessions.saved import SavedChat
from pyh2o.sessions.unfinished import path_beside
from pyh2o.system import archives
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
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(unfinished, "SECONDS", 0.0)
    return tmp_path / "talk"


def begun(llm: Llama, file: Path) -> Conversation:
    talk = Conversation(llm, sampling=SAMPLING)
    for message in ("hello", "and then?"):
        said(talk.say(message, max_tokens=20))
    talk.save(file)
    talk.noted_beside = file
    return talk


def killed(file: Path) -> Path:
    """What lies there at this moment."""
    copy = file.with_name("killed")
    shutil.copy(file, copy)
    shutil.copy(path_beside(file), path_beside(copy))
    if archives.of_session(file).exists():
        shutil.copy(archives.of_session(file), archives.of_session(copy))
    return copy


@pytest.mark.parametrize("settings", [EVICTING, RECALLING], ids=["evicting", "recalling"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_it_goes_on_where_it_was_cut(
    path: Path, file: Path, kind: str, settings: dict[str, Any]
) -> None:
    talk = begun(tiny_llama(path, **settings), file)
    n_turns = len(talk.turns) + (kind == "say")
    answer = ANSWERS[kind](talk)
    pieces = [next(answer) for _ in range(8)]
    copy = killed(file)
    whole = talk.turns  # not yet
    pieces += answer
    talk_after = Conversation.load(copy, tiny_llama(path, **settings))
    assert len(talk_after.turns) == n_turns
    cut, last = talk_after.turns[-1], talk.turns[-1]
    assert whole != talk.turns
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


def test_a_message_that_is_being_read_stays(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = begun(tiny_llama(path, **EVICTING), file)
    copies = []
    read = Text.read

    def copied(self: Text, *args: object, **kwargs: object) -> None:
        copies.append(killed(file))
        read(self, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Text, "read", copied)
        answer = said(talk.say(LONG, max_tokens=20))
    after = Conversation.load(copies[0], tiny_llama(path, **EVICTING))
    assert (after.turns[-1].user, after.turns[-1].answer) == (LONG, "")
    after.save(file)
    after = Conversation.load(file, tiny_llama(path, **EVICTING))
    assert said(after.go_on(max_tokens=20)) == answer
    for kind in ("regenerate", "say"):
        after = Conversation.load(copies[0], tiny_llama(path, **EVICTING))
        next(ANSWERS[kind](after))
        after.save(file)
        Conversation.load(file, tiny_llama(path, **EVICTING))


def test_what_is_saved_since_counts(path: Path, file: Path) -> None:
    talk = begun(tiny_llama(path, **EVICTING), file)
    said(talk.say(LONG, max_tokens=9))
    note = path_beside(file).read_bytes()
    talk.save(file)
    assert not path_beside(file).exists()
    for data in (note, note[:-5], b"[]"):
        path_beside(file).write_bytes(data)
        assert Conversation.load(file, tiny_llama(path, **EVICTING)).turns == talk.turns


def test_a_note_goes_where_its_session_goes(
    path: Path, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path))
    old, new = SavedChat("old"), SavedChat("new")
    talk = begun(tiny_llama(path, **EVICTING), old.path)
    next(talk.say(LONG))
    old.rename(new)
    assert Conversation.load(new.path, tiny_llama(path, **EVICTING)).turns[-1].user == LONG
    new.remove()
    with pytest.raises(SessionError):
        Conversation.load(new.path, tiny_llama(path, **EVICTING))
    assert list(tmp_path.glob("*unfinished")) == []
