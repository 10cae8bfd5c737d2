"""Thoughts of a conversation leave with the next message, and come back where it goes back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conversations import (
    EVICTING,
    check_positions,
    n_evaluated,
    next_logits,
    said,
    text_of,
    without_kv,
)
from pyh2o import Conversation, Llama
from pyh2o.writing import answer as answer_module
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.writer import Writer
from tiny_llama import assert_same_cache, tiny_llama

THOUGHT = b"<think>\nhm, let me see</think>\n\n"
N_ANSWER = len(THOUGHT) + 6  # tokens; those of the thought are bytes
WAYS: dict[str, dict[str, Any]] = {
    "evicting": {**EVICTING, "recall": 0},
    "recalling": {**EVICTING, "recall": 16},
    "small": {**EVICTING, "hh": 20, "recent": 20, "slack": 16, "recall": 8},
}


@pytest.fixture(autouse=True)
def thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer begins with a thought, and goes on with whatever the model draws."""

    class Thinking(Writer):
        def __init__(
            self, llm: Llama, sampling: Sampling, *, written: Sequence[int] = (), **_: Any
        ) -> None:
            model, n_sampled = llm.model, len(written)
            script = [model.tokenize(bytes([byte]), False, False)[-1] for byte in THOUGHT]
            ends = [token for token in range(model.n_vocab) if model.is_end(token)]

            def think(_ids: Any, logits: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
                nonlocal n_sampled
                logits[ends] = -np.inf
                if n_sampled < len(script):
                    logits[script[n_sampled]] = 1000
                n_sampled += 1
                return logits

            super().__init__(llm, sampling, written=written, logits_processor=think)

    monkeypatch.setattr(answer_module, "Writer", Thinking)


@pytest.fixture(params=WAYS)
def way(request: Any) -> dict[str, Any]:
    return WAYS[request.param]


def ask(chat: Conversation, message: str) -> str:
    answer = said(chat.say(message, max_tokens=N_ANSWER))
    check_positions(chat)
    assert answer.encode().startswith(THOUGHT)
    return answer


def thoughts(chat: Conversation) -> list[tuple[int, int]]:
    """Of all answers but the last."""
    starts = [turn.answer_start for turn in chat.turns[:-1]]
    return [(start, start + len(THOUGHT)) for start in starts]


def talk(llm: Llama, n_turns: int) -> Conversation:
    chat = Conversation(llm)
    for number in range(n_turns):
        ask(chat, f"and {number}?")
    return chat


def test_nothing_is_read_but_what_is_new(path: Path, way: dict[str, Any]) -> None:
    with tiny_llama(path, **way) as llm:
        chat = talk(llm, 10)
        assert llm.text.dropped_spans == thoughts(chat)
        assert n_evaluated(chat) == llm.n_tokens == len(text_of(chat)) - 1
        gone = {at for start, end in thoughts(chat)[:-1] for at in range(start, end)}
        held = {at for layer in range(2) for head in llm.kv_rows(layer)[0] for at in head}
        assert not held & gone


def test_with_keep_thoughts_they_stay(path: Path) -> None:
    with tiny_llama(path, **EVICTING, keep_thoughts=True) as llm:
        talk(llm, 3)
        assert llm.text.dropped_spans == []


def test_a_saved_one_goes_on_bit_for_bit(path: Path, tmp_path: Path, way: dict[str, Any]) -> None:
    with tiny_llama(path, **way) as llm, tiny_llama(path, **way) as other:
        chat = talk(llm, 4)
        chat.save(tmp_path / "chat.h2o")
        loaded = Conversation.load(tmp_path / "chat.h2o", other)
        for each in (chat, loaded):
            ask(each, "so?")
            ask(each, "and?")
        assert text_of(chat) == text_of(loaded)
        assert other.text.dropped_spans == llm.text.dropped_spans == thoughts(chat)
        assert_same_cache(llm, other)
        np.testing.assert_array_equal(next_logits(llm), next_logits(other))


def test_without_its_state_they_are_forgotten_as_they_are_read(
    path: Path, tmp_path: Path, way: dict[str, Any]
) -> None:
    """Also with another budget, as another text of the same tokens."""
    with tiny_llama(path, **way) as llm, tiny_llama(path, **{**way, "hh": 30}) as other:
        chat = talk(llm, 4)
        chat.save(tmp_path / "chat.h2o")
        loaded = Conversation.load(without_kv(tmp_path / "chat.h2o"), other)
        ask(loaded, "so?")
        assert other.text.dropped_spans == thoughts(loaded)
        chat._text.recover(0)
        ask(chat, "so?")
        assert llm.text.dropped_spans == thoughts(chat)
        assert text_of(chat)[: chat.turns[3].end] == text_of(loaded)[: loaded.turns[3].end]


def test_an_answer_can_be_continued_and_replaced(path: Path, way: dict[str, Any]) -> None:
    """It has its thoughts until something else is said."""
    with tiny_llama(path, **way) as llm:
        chat = talk(llm, 2)
        first = chat.turns[-1].answer + said(chat.go_on(max_tokens=5))
        assert said(chat.regenerate(max_tokens=N_ANSWER)).encode().startswith(THOUGHT)
        chat.choose(0)
        assert chat.turns[-1].answer == first
        said(chat.go_on(max_tokens=5))
        check_positions(chat)
        assert llm.text.dropped_spans == thoughts(chat)
        ask(chat, "so?")
        assert llm.text.dropped_spans == thoughts(chat)


def test_earlier_answers_can_be_replaced(path: Path, way: dict[str, Any]) -> None:
    """Their thoughts are read again, and are none that are forgotten."""
    with tiny_llama(path, **way) as llm:
        chat = talk(llm, 4)
        chat.undo()
        assert said(chat.regenerate(max_tokens=N_ANSWER)).encode().startswith(THOUGHT)
        assert llm.text.dropped_spans == thoughts(chat)
        chat.undo()
        chat.undo()
        ask(chat, "what?")
        assert llm.text.dropped_spans == thoughts(chat)
        for _ in chat.say("no"):
            break
        assert chat.turns[-1].finish == "interrupted"
        said(chat.edit("yes", max_tokens=N_ANSWER))
        check_positions(chat)
        assert llm.text.dropped_spans == thoughts(chat)


def test_a_failed_answer_leaves_all_as_it_was(path: Path, way: dict[str, Any]) -> None:
    with tiny_llama(path, **way) as llm:
        chat = talk(llm, 3)
        before = text_of(chat)

        def fail() -> None:
            raise KeyError

        llm.text.while_reading = fail
        llm.text.prompt_progress = lambda *_: fail()
        with pytest.raises(KeyError):
            said(chat.say("a message that takes some time to read " * 30, max_tokens=5))
        llm.text.while_reading = llm.text.prompt_progress = None
        assert text_of(chat) == before
        ask(chat, "so?")
        assert llm.text.dropped_spans == thoughts(chat)


def test_pinned_thoughts_stay(path: Path, way: dict[str, Any]) -> None:
    with tiny_llama(path, **way) as llm:
        chat = talk(llm, 2)
        start = chat.turns[-1].answer_start
        chat.pin(start + 4, start + 8)
        ask(chat, "so?")
        whole = thoughts(chat)[-1]
        assert llm.text.dropped_spans[1:] == [(start, start + 4), (start + 8, whole[1])]
        first = thoughts(chat)[0]
        chat.pin(first[0] - 2, first[1] + 2)
        assert chat.pins[:2] == ((first[0] - 2, first[0]), (first[1], first[1] + 2))
