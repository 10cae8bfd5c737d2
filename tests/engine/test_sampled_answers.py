"""Answers as they were sampled: in streams that are left, with stop strings, among other texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from many_texts import ask as ask_engine
from many_texts import at_once, tiny_engine
from pyh2o.engine import Engine
from sampled_answers import LETTERS, said, sampled_alone, words
from tiny_chat import CHATML, LLAMA_2, LLAMA_3, write_chat_gguf

BUDGET: dict[str, Any] = {"n_ctx": 256, "hh": 24, "recent": 24, "slack": 16}


MODEL: dict[str, Any] = {"template": CHATML}


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with tiny_engine(path, texts=4, **BUDGET) as running:
        yield running


def ask(engine: Engine, messages: list[Any], **arguments: Any) -> Any:
    return ask_engine(engine, messages, **{"max_tokens": 20, **sampled_alone(), **arguments})


def content(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def n_cached(answer: Any) -> int:
    n: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def test_a_stream_that_is_left_goes_on_with_what_had_come(
    engine: Engine, rng: np.random.Generator
) -> None:
    messages = [said(words(rng, 30))]
    stream = ask(engine, messages, stream=True, max_tokens=None)
    came = [chunk["choices"][0]["delta"] for chunk in itertools.islice(stream, 25)]
    stream.close()
    text = "".join(delta.get("content", "") for delta in came)
    assert len(text) >= 24
    n_there = max(place.kv.position for place in engine.report())
    messages += [said(text, by="assistant"), said("go on")]
    assert n_cached(ask(engine, messages)) == n_there


@pytest.mark.parametrize(
    ("template", "grammar"),
    # Llama 2's puts a space before answers, in the place of the one that models write.
    [(CHATML, LETTERS), (LLAMA_2, 'root ::= " " [ab]+'), (LLAMA_3, LETTERS)],
    ids=["chatml", "llama 2", "llama 3"],
)
def test_a_chat_evaluates_only_what_is_new(
    tmp_path: Path, rng: np.random.Generator, template: str, grammar: str
) -> None:
    """After evictions, and wherever it was meanwhile: in its place or out of it."""
    path = write_chat_gguf(tmp_path / "tiny.gguf", template)
    messages, used, sampled_otherwise = [said(words(rng, 16))], 0, 0
    with tiny_engine(path, texts=2, **BUDGET) as engine:
        for n_others in (0, 0, 1, 6, 0):
            for _ in range(n_others):
                ask(engine, [said(words(rng, 10))], max_tokens=3)
            before = engine.batches.tokens
            answer = ask(engine, messages, **sampled_alone(grammar))
            usage = answer["usage"]
            assert n_cached(answer) == max(0, used - 1)  # all but the newest token
            n_new = usage["prompt_tokens"] - n_cached(answer)
            assert engine.batches.tokens - before == n_new + usage["completion_tokens"] - 1
            used, text = usage["total_tokens"], content(answer)
            cut = engine.model.tokenize(b"\n" + text.encode(), add_bos=False)
            sampled_otherwise += len(cut) != usage["completion_tokens"]
            messages += [said(text, by="assistant"), said(words(rng, 2))]
        assert engine.stored.moved_in > 0
    assert sampled_otherwise > 0


def test_texts_at_once_stay_apart(engine: Engine, rng: np.random.Generator) -> None:
    """Each goes on in its own tokens, though they share a beginning and are written at once."""
    system = said(words(rng, 20), by="system")

    def talk(seed: int) -> None:
        mine = np.random.default_rng(seed)
        messages, used = [system, said(words(mine, 4))], 0
        for _ in range(4):
            answer = ask(engine, messages, seed=seed)
            if used:
                assert n_cached(answer) == used - 1
            used = answer["usage"]["total_tokens"]
            messages += [said(content(answer), by="assistant"), said(words(mine, 2))]

    seeds = rng.integers(0, 2**31, 4).tolist()
    at_once([lambda seed=seed: talk(seed) for seed in seeds])


def test_the_prompt_is_cut_once(engine: Engine, rng: np.random.Generator) -> None:
    """What is recorded between the way to a place and the reading there cannot part the two."""
    messages = [said(words(rng, 10))]
    answer = ask(engine, messages)
    messages += [said(content(answer), by="assistant"), said("and")]
    cuts = 0
    cut = engine.model.sampled_texts.as_sampled

    def counted(*args: Any) -> Any:
        nonlocal cuts
        cuts += 1
        return cut(*args)

    engine.model.sampled_texts.as_sampled = counted  # type: ignore[method-assign]
    ask(engine, messages)
    assert cuts == 1
