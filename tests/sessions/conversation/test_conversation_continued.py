"""Answers that were stopped and go on: as if they had not been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archived_talk import RECALLING, assert_equal
from conversations import (
    EVICTING,
    FULL,
    ROOMY,
    check_positions,
    in_cache,
    next_logits,
    said,
    stopping_at,
)
from pyh2o import Conversation
from pyh2o.writing.sampling import Sampling
from tiny_llama import tiny_llama

SAMPLING = Sampling(temperature=1.2, top_k=0, seed=5, frequency_penalty=0.5)


def left_after(conversation: Conversation, message: str, n_pieces: int) -> str:
    """An answer that its reader leaves after so many pieces."""
    answer = conversation.say(message)
    text = "".join(next(answer) for _ in range(n_pieces))
    answer.close()
    return text


def state_of(conversation: Conversation) -> list[Any]:
    llm = conversation.llm
    rows = [array for layer in range(2) for array in llm.kv_rows(layer)] if llm.evicting else []
    return [conversation.turns, in_cache(llm), next_logits(llm), *rows]


@pytest.mark.parametrize("fair_turns", [False, True])
@pytest.mark.parametrize("settings", [EVICTING, FULL, RECALLING])
def test_it_goes_on_as_if_it_had_not_been_stopped(
    path: Path, tmp_path: Path, settings: dict[str, Any], fair_turns: bool
) -> None:
    """Bit for bit, however often it is stopped, and also if the rest comes from a file."""
    llm = tiny_llama(path, **settings)
    whole = Conversation(llm, sampling=SAMPLING, fair_turns=fair_turns)
    said(whole.say("hello " * 30, max_tokens=40))
    text = said(whole.say("what was it? " * 12, max_tokens=150))
    expected = [state_of(whole)]
    said(whole.say("and then?", max_tokens=30))
    expected.append([*state_of(whole), whole.llm.recalled()])

    parts = Conversation(tiny_llama(path, **settings), sampling=SAMPLING, fair_turns=fair_turns)
    said(parts.say("hello " * 30, max_tokens=40))
    begun = left_after(parts, "what was it? " * 12, 3)
    assert parts.turns[-1].finish == "interrupted"
    begun += said(parts.resume(max_tokens=1))
    begun += said(parts.resume(max_tokens=60))
    parts.save(tmp_path / "chat")
    parts = Conversation.load(tmp_path / "chat", tiny_llama(path, **settings))
    last = parts.turns[-1]
    begun += said(parts.resume(max_tokens=150 - (last.end - last.answer_start)))
    assert begun == text
    assert_equal(state_of(parts), expected[0])
    check_positions(parts)
    said(parts.say("and then?", max_tokens=30))
    assert_equal([*state_of(parts), parts.llm.recalled()], expected[1])


def test_a_stop_string_may_lie_across_the_stop(path: Path, drawn: list[list[int]]) -> None:
    """What it begins with was given out then, and is not given out again, nor kept in the end."""
    said(Conversation(tiny_llama(path, **ROOMY)).say("hello", max_tokens=60))
    llm = tiny_llama(path, **ROOMY)
    whole = llm.detokenize(drawn[0])
    sizes = np.cumsum([len(llm.detokenize([token])) for token in drawn[0]])
    found = 0
    for place in range(1, len(whole) - 3):
        stop = whole[place : place + 3]
        n_first = int(np.searchsorted(sizes, place + 2)) + 1
        if not stop.isascii() or whole.index(stop) != place or sizes[n_first - 1] != place + 2:
            continue
        found += 1
        llm.chat_handler = stopping_at(stop.decode())
        conversation = Conversation(llm)
        expected = whole[:place].decode(errors="ignore")
        begun = said(conversation.say("hello", max_tokens=n_first))
        assert begun == expected + stop[:2].decode()
        assert conversation.turns[0].answer == begun
        assert said(conversation.resume(max_tokens=40)) == ""
        (turn,) = conversation.turns
        assert (turn.finish, turn.answer) == ("stop", expected)
        check_positions(conversation)
        # where it is another text that begins so, all of it comes in the end
        other = stop[:2] + (b"x" if stop[2:] != b"x" else b"y")
        if other not in whole:
            llm.chat_handler = stopping_at(other.decode())
            conversation = Conversation(llm)
            text = said(conversation.say("hello", max_tokens=n_first))
            text += said(conversation.resume(max_tokens=60 - n_first))
            assert text == conversation.turns[0].answer == whole.decode(errors="ignore")
    assert found > 3
