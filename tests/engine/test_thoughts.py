"""Thoughts leave the cache, and clients leave them out of the history: nothing is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from many_texts import ask as ask_engine
from many_texts import tiny_engine
from pyh2o.engine import Engine
from sampled_answers import said, sampled_alone, words
from tiny_chat import OPENS_THOUGHTS, THINKING, write_chat_gguf
from tiny_llama import tiny_llama

BUDGET: dict[str, Any] = {"n_ctx": 512, "hh": 40, "recent": 40, "slack": 32}
WRITTEN = 'root ::= "<think>\\n" [ab]{5,60} "</think>\\n\\n" [ab]{4,12}'
OPENED = 'root ::= "\\n\\n" [ab]{4,12}'  # behind thoughts that the call opens


MODEL: dict[str, Any] = {"template": THINKING}


def ask(model: Any, messages: list[Any], grammar: str = WRITTEN, **arguments: Any) -> Any:
    if grammar == OPENED:
        arguments["reasoning_budget"] = 30
    arguments = {"max_tokens": None, **sampled_alone(grammar), **arguments}
    if isinstance(model, Engine):
        answer = ask_engine(model, messages, **arguments)
    else:
        answer = model.create_chat_completion(messages, **arguments)
    assert answer["choices"][0]["finish_reason"] == "stop"
    return answer


def stripped(answer: Any) -> Any:
    """The message, as clients send it back."""
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"]
    return said(message["content"].strip(), by="assistant")


def n_remembered(engine: Engine) -> int:
    """Of the longest text."""
    return max(len(slot.text.kept_positions) for slot in engine._slots.all)


@pytest.mark.parametrize("recall", [0, 20])
@pytest.mark.parametrize("grammar", [WRITTEN, OPENED], ids=["written", "opened"])
def test_ten_thinking_turns_read_nothing_again(
    tmp_path: Path, rng: np.random.Generator, grammar: str, recall: int
) -> None:
    """Also of a chat that had to leave its place; and what is used is what the client sent."""
    template = THINKING if grammar == WRITTEN else OPENS_THOUGHTS
    path = write_chat_gguf(tmp_path / "tiny.gguf", template)
    messages, n_there, n_sampled = [said(words(rng, 10))], 0, 0
    with tiny_engine(path, texts=2, **{**BUDGET, "recall": recall}) as engine:
        for turn in range(10):
            if turn == 5:
                for _ in range(3):
                    ask(engine, [said(words(rng, 12))], grammar)
                assert engine.stored.texts > 0
            before = engine.batches.tokens
            answer = ask(engine, messages, grammar)
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == n_there
            read = engine.batches.tokens - before
            assert read == usage["total_tokens"] - n_there
            n_there, n_sampled = n_remembered(engine), n_sampled + usage["completion_tokens"]
            messages += [stripped(answer), said(words(rng, 4))]
        longest = max((slot.text for slot in engine._slots.all), key=lambda text: text.n_tokens)
        assert n_sampled > 200
        gone = {at for start, end in longest.dropped_spans for at in range(start, end)}
        assert len(longest.dropped_spans) == 10
        assert len(gone) + n_there == longest.n_tokens
        held = {at for layer in range(2) for head in longest.kv_rows(layer)[0] for at in head}
        assert len(held & gone) < len(gone) / 20


def test_thoughts_that_stay_are_read_again_without(path: Path, rng: np.random.Generator) -> None:
    with tiny_engine(path, texts=1, keep_reasoning=True, **BUDGET) as engine:
        messages = [said(words(rng, 10))]
        # an answer as long as its thoughts may be found behind them, as behind dropped messages
        answer = ask(engine, messages, 'root ::= "<think>\\n" [ab]{40} "</think>\\n\\n" [ab]{4}')
        assert engine._slots.all[0].text.dropped_spans == []
        messages += [stripped(answer), said("go on")]
        n_cached = ask(engine, messages)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert n_cached <= answer["usage"]["prompt_tokens"]


def test_answers_without_an_end_keep_their_thoughts(path: Path, rng: np.random.Generator) -> None:
    """They may be continued; and so do those that have nothing else."""
    with tiny_llama(path, **BUDGET) as llm:
        ask(llm, [said("Yes?")], 'root ::= "<think>" [ab]{9} "</think>"')
        assert llm.text.dropped_spans == []
        bias = sampled_alone('root ::= "<think>" [ab]{9} "</think>" [ab]+')
        llm.create_chat_completion([said("Yes?")], max_tokens=40, **bias)
        assert llm.text.dropped_spans == []
        ask(llm, [said("Yes?")])
        assert len(llm.text.dropped_spans) == 1


def test_the_same_prompt_again_gets_the_same_answer(path: Path, rng: np.random.Generator) -> None:
    """As if there had been none: what was dropped lies behind it."""
    with tiny_llama(path, **BUDGET) as llm:
        messages = [said(words(rng, 6))]
        first, second = (ask(llm, messages, seed=3)["choices"] for _ in range(2))
        assert first == second
        assert len(llm.text.dropped_spans) == 1


def test_thoughts_that_are_pinned_stay(path: Path) -> None:
    with tiny_llama(path, **BUDGET, pinned=60) as llm:
        ask(llm, [said("Yes?")])
        assert llm.text.dropped_spans == []
