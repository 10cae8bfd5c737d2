"""Answers that were replaced come back, as if they had been there all the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archived_talk import RECALLING
from conversations import (
    EVICTING,
    FULL,
    SHORT,
    check_positions,
    in_cache,
    next_logits,
    said,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError
from pyh2o.sessions.layout import Pins
from pyh2o.sessions.turns import MAX_KEPT
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

LONG = 150  # tokens of an answer during which a compaction happens
MESSAGE = "a message that takes its time "


def attempts_of(conversation: Conversation) -> list[int]:
    return [turn.attempt for turn in conversation.answers]


def with_attempts(llm: Llama, n: int = 3, limit: int = SHORT, **settings: Any) -> Conversation:
    """A conversation whose last message has so many answers."""
    conversation = Conversation(llm, **settings)
    said(conversation.say(MESSAGE, max_tokens=limit))
    said(conversation.say(MESSAGE * 4, max_tokens=limit))
    for _ in range(n - 1):
        said(conversation.regenerate(max_tokens=limit))
    return conversation


@pytest.mark.parametrize("settings", [EVICTING, RECALLING], ids=["evicting", "recalling"])
def test_it_is_as_if_it_had_been_the_answer_all_the_time(
    path: Path, settings: dict[str, Any]
) -> None:
    """Bit for bit: kept rows and their scores, logits, and all that is said next."""
    sampling = Sampling(temperature=1.2, top_k=0, seed=5)
    for chosen in range(3):
        straight, winding = (
            with_attempts(tiny_llama(path, **settings), n, LONG, sampling=sampling)
            for n in (chosen + 1, 3)
        )
        if chosen < 2:
            winding.choose(1 - chosen)
        winding.choose(chosen)
        assert winding.turns == straight.turns
        assert text_of(winding) == text_of(straight)
        check_positions(winding)
        assert winding.unread == straight.unread
        for each in (straight, winding):
            said(each.say("and then?", max_tokens=30))
        assert winding.turns == straight.turns
        assert in_cache(winding.llm) == in_cache(straight.llm)
        np.testing.assert_array_equal(next_logits(winding.llm), next_logits(straight.llm))
        for layer in range(2):
            for mine, other in zip(
                winding.llm.kv_rows(layer), straight.llm.kv_rows(layer), strict=True
            ):
                np.testing.assert_array_equal(mine, other)


def test_the_oldest_go_where_there_are_too_many(llm: Llama) -> None:
    conversation = with_attempts(llm, MAX_KEPT + 1, 2)
    conversation.choose(0)
    said(conversation.regenerate(max_tokens=2))
    # the first was in use until now
    assert attempts_of(conversation) == [0, *range(2, MAX_KEPT + 2)]


def test_what_is_not_there_cannot_be_chosen(llm: Llama) -> None:
    conversation = Conversation(llm)
    assert conversation.answers == ()
    with pytest.raises(PyH2OError, match="there is no message yet"):
        conversation.choose(0)
    said(conversation.say("one", max_tokens=SHORT))
    conversation.choose(0)
    said(conversation.regenerate(max_tokens=SHORT))
    before = conversation.answers
    with pytest.raises(PyH2OError, match="no answer of attempt 2: available are 0, 1"):
        conversation.choose(2)
    assert conversation.answers == before


@pytest.mark.parametrize("others", [(), ((5, 9),)], ids=["alone", "beside another"])
def test_pins_in_an_answer_go_with_it(path: Path, others: Pins) -> None:
    llm = tiny_llama(path, **{**EVICTING, "hh": 120})
    conversation = Conversation(llm)
    said(conversation.say(MESSAGE, max_tokens=SHORT))
    for span in others:
        conversation.pin(*span)
    said(conversation.say(MESSAGE * 4, max_tokens=LONG))
    end = conversation.turns[-1].end - 1
    answer = (end - 9, end)
    conversation.pin(*answer)
    said(conversation.regenerate(max_tokens=LONG))
    conversation.choose(0)
    assert conversation.pins == others
    said(conversation.say(MESSAGE * 8, max_tokens=LONG))
    held = [set(head) for layer in range(2) for head in llm.kv_rows(layer)[0].tolist()]
    assert all(set(range(*span)) <= head for head in held for span in others)
    assert not all(set(range(*answer)) <= head for head in held)


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------


def test_the_same_model_keeps_them_under_other_settings(
    path: Path, llm: Llama, tmp_path: Path
) -> None:
    file = tmp_path / "chat"
    conversation = with_attempts(llm)
    conversation.save(file)
    reread = Conversation.load(file, tiny_llama(path, **FULL))
    assert reread.answers == conversation.answers
    reread.choose(0)
    said(reread.say("bye", max_tokens=SHORT))
    assert in_cache(reread.llm) == text_of(reread)[:-1]
    other = write_chat_gguf(tmp_path / "other.gguf", CHATML, n_layer=2, seed=9)
    talk = Conversation.load(file, tiny_llama(other, **EVICTING))
    assert attempts_of(talk) == [conversation.turns[-1].attempt]
