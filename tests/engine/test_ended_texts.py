"""Texts that have ended: they go on in their place, or come back from the store."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from many_texts import llama_in, tiny_engine
from pyh2o import Llama
from pyh2o.core.text import Text
from pyh2o.engine import Engine
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

N_PLACES = 4
N_VOCAB = 384
BUDGET = {"hh": 24, "recent": 16, "slack": 12, "n_ctx": 256}


MODEL: dict[str, Any] = {"seed": 11}


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with tiny_engine(path, texts=N_PLACES, **BUDGET) as engine:
        yield engine


def complete(engine: Engine, prompt: list[int], n: int, n_new: int | None = 0) -> list[int]:
    """The prompt and n tokens that the model likes best."""
    with llama_in(engine, prompt, n_new=n_new) as llm:
        drawn = []
        for token in llm.generate(prompt, temp=0.0):
            drawn.append(token)
            if len(drawn) == n:
                break
    return prompt + drawn


def logits_of_answer(llm: Llama, prompt: list[int], n: int) -> np.ndarray:
    """The logits behind a prompt and each of the n - 1 tokens that follow; [n, n_vocab].

    For a model with `logits_all`.
    """
    rows: list[np.ndarray] = []
    for _ in llm.generate(prompt, temp=0.0):
        rows.append(llm.scores[llm.n_tokens - 1].copy())
        if len(rows) == n:
            break
    return np.array(rows)


def n_read(engine: Engine, prompt: list[int]) -> int:
    """Tokens that are evaluated for one token behind this prompt."""
    before = engine.batches.tokens
    complete(engine, prompt, 1)
    return engine.batches.tokens - before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ggml's products of other processors")
@pytest.mark.parametrize("recall", [0, 8])
def test_a_prompt_that_is_completed_again_is_not_read_again(
    tmp_path: Path, recall: int, rng: np.random.Generator
) -> None:
    """Where the first answer has evicted what it needs; bit for bit, with weights like these."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, dtype=GGMLQuantizationType.Q4_1)
    prompt = rng.integers(3, N_VOCAB, 150).tolist()
    settings = {**BUDGET, "recall": recall, "recent": 48, "logits_all": True}
    with tiny_llama(path, **settings) as alone:
        expected = logits_of_answer(alone, prompt, 90)
    with tiny_engine(path, texts=N_PLACES, **settings) as engine:
        read = []
        for _ in range(3):
            before = engine.batches.tokens
            with llama_in(engine, prompt, n_new=90) as llm:
                logits = logits_of_answer(llm, prompt, 90)
            assert np.array_equal(logits, expected)
            read.append(engine.batches.tokens - before - 89)
        first, *others = read
        again = engine.model.min_chunk
        assert first == 150
        assert all(again <= n < again + BUDGET["slack"] for n in others)
        assert engine.stored.texts == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ggml's products of other processors")
def test_no_prompt_is_read_otherwise_for_a_copy_of_it(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Wherever the copy is taken: pieces of few tokens would be rounded otherwise."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, dtype=GGMLQuantizationType.Q4_1, n_head_kv=1, n_layer=8
    )
    settings = {**BUDGET, "slack": 20, "logits_all": True}
    with tiny_llama(path, **settings) as alone, tiny_engine(path, texts=1, **settings) as engine:
        for n in range(40, 90):
            prompt = rng.integers(3, N_VOCAB, n).tolist()
            alone.reset()
            expected = logits_of_answer(alone, prompt, 3)
            with llama_in(engine, prompt, n_new=None) as llm:
                assert np.array_equal(logits_of_answer(llm, prompt, 3), expected), n


def test_what_follows_a_prompt_may_need_no_copy_of_it(
    engine: Engine, rng: np.random.Generator
) -> None:
    prompt = rng.integers(3, N_VOCAB, 20).tolist()
    for n_new in (0, 10):
        complete(engine, prompt, 10, n_new)
    assert engine.stored.texts == 0


@pytest.mark.parametrize("n_slots", [1, 2])
def test_a_prompt_that_many_send_is_read_once(
    path: Path, rng: np.random.Generator, n_slots: int
) -> None:
    """Whoever comes in between, and though each answer evicts what the next request needs."""
    prompt = rng.integers(3, N_VOCAB, 150).tolist()
    with tiny_engine(path, texts=n_slots, **BUDGET) as engine:
        read = []
        for _ in range(5):
            before = engine.batches.tokens
            complete(engine, prompt, 90, 90)
            read.append(engine.batches.tokens - before - 89)
            for _ in range(n_slots):
                complete(engine, rng.integers(3, N_VOCAB, 70).tolist(), 5)
        assert read[0] == 150
        assert max(read[1:]) < engine.model.min_chunk + BUDGET["slack"]


def test_a_copy_of_a_prompt_goes_when_the_conversation_has_gone_on(
    path: Path, rng: np.random.Generator
) -> None:
    with tiny_engine(path, texts=1, **BUDGET) as engine:
        text = rng.integers(3, N_VOCAB, 70).tolist()
        for _ in range(5):
            text = complete(engine, text, 40, None) + rng.integers(3, N_VOCAB, 20).tolist()
            assert engine.stored.texts == 1


def test_a_text_whose_beginning_nobody_tells_costs_no_other_one(
    path: Path, rng: np.random.Generator
) -> None:
    with tiny_engine(path, texts=1, **BUDGET) as engine:
        text = complete(engine, rng.integers(3, N_VOCAB, 70).tolist(), 5)
        with llama_in(engine) as llm:
            assert llm.n_tokens == 0
            llm.eval([3, 4])
        assert n_read(engine, [*text, 5]) == 2


def test_the_store_drops_what_is_oldest(path: Path, rng: np.random.Generator) -> None:
    with tiny_engine(path, texts=1, store_mib=1, **BUDGET) as engine:
        texts = [complete(engine, rng.integers(3, N_VOCAB, 70).tolist(), 5) for _ in range(30)]
        stored = engine.stored
        assert stored.bytes <= 2**20
        assert 10 < stored.texts < 25
        assert stored.dropped + stored.texts == stored.moved_out == 29
        assert n_read(engine, [*texts[0], 5]) == len(texts[0]) + 1
        assert n_read(engine, [*texts[-2], 5]) == 2


def test_what_many_texts_begin_with_is_read_once(engine: Engine, rng: np.random.Generator) -> None:
    """The second one shows that it is shared; from the third on nobody reads it."""
    shared = rng.integers(3, N_VOCAB, 150).tolist()
    prompts = [shared + rng.integers(3, N_VOCAB, 20).tolist() for _ in range(6)]
    with tiny_llama(Path(engine.model.path), **BUDGET) as alone:
        expected = [next(alone.generate(prompt, temp=0.0)) for prompt in prompts]
    n_tokens = []
    for prompt, token in zip(prompts, expected, strict=True):
        before = engine.batches.tokens
        assert complete(engine, prompt, 1)[-1] == token
        n_tokens.append(engine.batches.tokens - before)
    first, second, *others = n_tokens
    assert (first, second) == (170, 170)
    assert all(20 <= n < 20 + BUDGET["slack"] for n in others)


def test_a_beginning_that_is_often_used_outlives_others(
    path: Path, rng: np.random.Generator
) -> None:
    shared = rng.integers(3, N_VOCAB, 150).tolist()
    with tiny_engine(path, texts=1, store_mib=1, **BUDGET) as engine:
        for _ in range(40):
            complete(engine, shared + rng.integers(3, N_VOCAB, 20).tolist(), 1)
        for _ in range(30):
            complete(engine, rng.integers(3, N_VOCAB, 70).tolist(), 1)
        assert engine.stored.dropped > 20
        assert 3 <= n_read(engine, [*shared, 5, 6, 7]) < 3 + BUDGET["slack"]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_no_place_is_lost_when_a_text_cannot_come_back(
    path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, error: type
) -> None:
    with tiny_engine(path, texts=1, **BUDGET) as engine:
        text = complete(engine, rng.integers(3, N_VOCAB, 70).tolist(), 10)
        complete(engine, rng.integers(3, N_VOCAB, 30).tolist(), 5)

        def fails(*_args: object) -> None:
            raise error

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Text, "load_kv_state", fails)
            complete(engine, [*text, 5, 6, 7], 1)
        assert engine.n_running == 0
        with tiny_llama(path, **BUDGET) as alone:
            expected = next(alone.generate([*text, 5, 6, 7], temp=0.0))
        assert complete(engine, [*text, 5, 6, 7], 1)[-1] == expected
