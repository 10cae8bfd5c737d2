"""Saved conversations that go on under another model or other settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chat_turns import ChatTurns
from conversations import EVICTING, FULL, SHORT, SYSTEM, check_positions, in_cache, said, text_of
from pyh2o import Conversation
from pyh2o.errors import SettingsError
from pyh2o.sessions.database import Database
from pyh2o.sessions.passages import pin_sentences, pinned_passages
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

MADE_WITH = {**EVICTING, "hh": 90}
OTHER = {"n_ctx": 600, "hh": 200, "recent": 80, "slack": 40}


@pytest.fixture
def file(path: Path, tmp_path: Path) -> Path:
    conversation = Conversation(
        tiny_llama(path, **MADE_WITH), system=SYSTEM, sampling=Sampling(seed=7)
    )
    said(conversation.say("The code is 4711. Well?", max_tokens=30))
    said(conversation.say("two", max_tokens=100))
    pin_sentences(conversation, "code")
    conversation.save(tmp_path / "chat")
    return tmp_path / "chat"


@pytest.mark.parametrize("settings", [OTHER, FULL])
def test_other_settings_read_the_same_tokens(
    path: Path, file: Path, settings: dict[str, Any]
) -> None:
    llm = tiny_llama(path, **settings)
    before = file.read_bytes()
    conversation = Conversation.load(file, llm)
    tokens = text_of(Conversation.load(file, tiny_llama(path, **MADE_WITH)))
    assert text_of(conversation) == tokens
    assert (conversation.system, conversation.sampling.seed) == (SYSTEM, 7)
    assert conversation.unread == tokens
    said(conversation.say("three", max_tokens=SHORT))
    assert in_cache(llm)[: len(tokens)] == tokens
    if llm.evicting:
        (pin,) = pinned_passages(conversation)
        assert (pin.text, pin.held) == ("The code is 4711.", 1.0)
    check_positions(conversation)
    assert file.read_bytes() == before
    conversation.save(file)
    assert Conversation.load(file, llm).turns == conversation.turns


def test_another_model_reads_the_same_texts(path: Path, file: Path, tmp_path: Path) -> None:
    answer = "It is 4711, <|im_end|> as you said."
    with Database(file, single=True) as database:
        (info,) = database.texts()
        one, two = database.read(info.id).messages
        database.write(info.id, [replace(one, answer=answer), replace(two, answer="")])
    other = write_chat_gguf(tmp_path / "other.gguf", CHATML, n_layer=2, seed=9)
    llm = tiny_llama(other, **OTHER, chat_format="zephyr")
    conversation = Conversation.load(file, llm)
    first, second = conversation.turns
    assert (first.user, first.answer) == ("The code is 4711. Well?", answer)
    tokens = text_of(conversation)
    assert llm.detokenize(tokens[first.answer_start : first.end]).decode() == answer
    assert (second.answer, second.end - second.answer_start) == ("", 3)  # a sign that says so
    expected = ChatTurns(llm.text.model, SYSTEM)
    assert tokens[: first.answer_start] == expected.first_turn(first.user)
    assert tokens[first.end : second.answer_start] == expected.next_turn("two")
    assert conversation.pins == ()
    check_positions(conversation)
    assert Path(llm.model_path).name == "other.gguf"


def test_pins_that_do_not_fit_are_dropped(path: Path, file: Path) -> None:
    conversation = Conversation.load(file, tiny_llama(path, n_ctx=600, hh=44, recent=80, slack=40))
    assert conversation.pins == ()
    said(conversation.say("on", max_tokens=SHORT))


def test_refused_before_the_cache_is_dropped(path: Path, file: Path) -> None:
    """The owner of the model continues."""
    llm = tiny_llama(path, n_ctx=600, hh=10, recent=80, slack=40)
    mine = Conversation(llm)
    said(mine.say("mine", max_tokens=SHORT))
    tokens = in_cache(llm)
    with pytest.raises(SettingsError, match="raise hh"):
        Conversation.load(file, llm)
    assert in_cache(llm) == tokens
    said(mine.say("on", max_tokens=SHORT))
    assert len(mine.turns) == 2
