"""Conversations about pictures, which are saved with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conversations import said, without_kv
from pyh2o import Conversation, Llama
from pyh2o.core.projector import is_of_picture, keys_in
from pyh2o.errors import SessionError
from pyh2o.sessions import text_session
from pyh2o.sessions.database import Database
from pyh2o.sessions.text_session import read_file
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama
from tiny_pictures import mark_of, tiny_seer, write_models
from tiny_projector import N_PATCHES, png

SETTINGS: dict[str, Any] = {"n_ctx": 1024, "hh": 64, "recent": 64, "slack": 32, "recall": 16}
SHORT = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("seer"))


@pytest.fixture
def seer(models: tuple[Path, Path]) -> Iterator[Llama]:
    with tiny_seer(models, **SETTINGS) as llm:
        yield llm


def talk(seer: Llama) -> Conversation:
    """A conversation of two turns, the first about a picture."""
    conversation = Conversation(seer)
    said(conversation.say(f"{mark_of(seer, png(1))}\nwhat is that?", max_tokens=SHORT))
    said(conversation.say("and again, what is that?", max_tokens=SHORT))
    return conversation


def test_turns_read_only_what_is_new(seer: Llama) -> None:
    conversation = talk(seer)
    first, second = conversation.turns
    assert first.answer_start - first.start > N_PATCHES
    assert second.start == first.end
    assert seer.n_tokens == second.end - 1


@pytest.mark.parametrize("message", ["{}", "{}<|im_end|>{}", "<|im_end|> {}"])
def test_pictures_beside_marks_of_the_template(
    message: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """No mark in a message is one, and no token of a picture is looked up in the vocabulary."""
    model = write_chat_gguf(tmp_path / "marks.gguf", CHATML.replace("}}\n", "}}"))
    with tiny_seer((model, models[1]), **SETTINGS) as llm:
        conversation = Conversation(llm)
        for number in (1, 2):
            text = message.replace("{}", mark_of(llm, png(number)))
            said(conversation.say(text, max_tokens=SHORT))
            turn = conversation.turns[-1]
            tokens = conversation.tokens[turn.start : turn.answer_start]
            assert sum(map(is_of_picture, tokens)) == N_PATCHES * message.count("{}")


def pictures_in(file: Path) -> dict[str, bytes]:
    return read_file(file)[0].pictures


@pytest.mark.parametrize("reread", [False, True])
def test_a_picture_is_saved_with_its_conversation(
    reread: bool, seer: Llama, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Also where all is read again, by a program that has never seen the picture."""
    file = tmp_path / "talk.session"
    conversation = talk(seer)
    conversation.save(file)
    assert list(pictures_in(file).values()) == [png(1)]
    expected = said(conversation.say("more", max_tokens=SHORT))
    with tiny_seer(models, **SETTINGS) as other:
        loaded = Conversation.load(without_kv(file) if reread else file, other)
        assert loaded.tokens == conversation.tokens[: len(loaded.tokens)]
        found = said(loaded.say("more", max_tokens=SHORT))
        assert reread or found == expected
        loaded.save(tmp_path / "again.session")
    assert pictures_in(tmp_path / "again.session") == pictures_in(file)


def test_a_turn_that_is_taken_back_takes_its_picture(seer: Llama, tmp_path: Path) -> None:
    conversation = talk(seer)
    conversation.undo()
    conversation.undo()
    said(conversation.say("hello", max_tokens=SHORT))
    conversation.save(tmp_path / "talk.session")
    assert pictures_in(tmp_path / "talk.session") == {}


def test_what_was_evicted_is_read_again_with_the_picture(
    seer: Llama, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """A text that goes back before what the cache holds, in a program that only has the file."""
    file = tmp_path / "talk.session"
    conversation = talk(seer)
    for _ in range(3):
        said(conversation.say("go on, and say more of it " * 4, max_tokens=SHORT))
    conversation.save(file)
    with tiny_seer(models, **SETTINGS) as other:
        loaded = Conversation.load(file, other)
        for _ in range(4):
            loaded.undo()
        assert len(loaded.unread) > N_PATCHES
        assert said(loaded.say("and again, what is that?", max_tokens=SHORT))


def test_a_model_without_a_projector_leaves_it_alone(
    seer: Llama, models: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / "talk.session"
    talk(seer).save(file)
    match = r"has pictures.*--mmproj FILE"
    with tiny_llama(models[0], **SETTINGS) as blind, pytest.raises(SessionError, match=match):
        Conversation.load(file, blind)


def test_a_picture_of_an_answer_that_was_cut_off_is_there(
    seer: Llama, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_session, "SECONDS", 0.0)
    database = Database(tmp_path / "chats.db")
    conversation = Conversation(seer)
    text = conversation.keep_in(database, "talk")
    answer = conversation.say(f"{mark_of(seer, png(4))}\nwhat is that?", max_tokens=SHORT)
    next(answer)
    with tiny_seer(models, **SETTINGS) as other:
        loaded = Conversation.open(database, text, other)
        assert loaded.turns[0].finish == "interrupted"
        assert database.pictures(text) == {keys_in(loaded.turns[0].user)[0]: png(4)}
        assert said(loaded.resume(max_tokens=SHORT))
