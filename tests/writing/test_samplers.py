"""DRY, XTC, min-p and typical: the draws of llama.cpp's own chain, and how far DRY looks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import _internals as internals

from pyh2o import Llama
from pyh2o.core.model import Model
from pyh2o.writing.sampler import Sampler
from pyh2o.writing.sampling import Sampling
from random_cases import Cases
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

WINDOW = 64
FLAT = {"repeat_penalty": 1.0, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=17)
    llm: Llama
    with tiny_llama(path, n_ctx=WINDOW, hh=10, recent=10) as llm:
        yield llm.text.model


def default_chain(model: Model, draws: Sampling) -> Any:
    """In the order of llama.cpp's own programs."""
    chain = internals.LlamaSampler()
    penalties = draws.repeat_penalty, draws.frequency_penalty, draws.presence_penalty
    chain.add_penalties(model.n_vocab, 64, *penalties)
    chain.add_dry(
        model.native,
        draws.dry_multiplier,
        draws.dry_base,
        draws.dry_allowed_length,
        draws.dry_penalty_last_n,
        list(draws.dry_sequence_breakers),
    )
    chain.add_top_k(draws.top_k)
    chain.add_typical(draws.typical_p, 0)
    chain.add_top_p(draws.top_p, 0)
    chain.add_min_p(draws.min_p, 0)
    chain.add_xtc(draws.xtc_probability, draws.xtc_threshold, 0, draws.seed)
    chain.add_temp(draws.temperature)
    chain.add_dist(draws.seed)
    return chain


def drawn_by(chain: Any, logits: Any) -> int:
    n_vocab = len(logits)
    data = (llama_cpp.llama_token_data * n_vocab)(
        *zip(range(n_vocab), logits, [0.0] * n_vocab, strict=True)
    )
    array = llama_cpp.llama_token_data_array(data, n_vocab, -1, False)
    llama_cpp.llama_sampler_apply(chain.sampler, ctypes.byref(array))
    return int(array.data[array.selected].id)


def test_tokens_are_those_of_llama_cpps_chain(model: Model, cases: Cases) -> None:
    n_different = 0
    for number, rng in cases(range(30)):
        draws = Sampling(
            temperature=float(rng.choice([0.7, 1.5])),
            top_k=int(rng.choice([0, 10])),
            top_p=float(rng.choice([1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.1])),
            typical_p=float(rng.choice([1.0, 0.8])),
            repeat_penalty=float(rng.choice([1.0, 1.05])),
            dry_multiplier=float(rng.choice([0.8, 3.0])),
            dry_base=float(rng.choice([1.0, 1.75])),
            dry_allowed_length=int(rng.integers(0, 4)),
            dry_penalty_last_n=int(rng.integers(1, WINDOW)),
            dry_sequence_breakers=tuple(rng.choice(["a", "\n", "th"], 2)),
            xtc_probability=float(rng.choice([0.0, 1.0])),
            xtc_threshold=float(rng.choice([0.05, 0.1])),
            seed=int(rng.integers(2**32 - 1)),
        )
        if number % 2:  # where one token is left, XTC takes a random number with us alone
            all_left = {"typical_p": 1.0, "min_p": 0.0, "top_p": 1.0}
            draws = replace(draws, xtc_probability=0.4, xtc_threshold=0.04, **all_left)
        chain, ours = default_chain(model, draws), Sampler(model, draws)
        plain = Sampler(model, Sampling(repeat_penalty=1.0, top_k=0, top_p=1, min_p=0, seed=5))
        text = rng.integers(model.n_vocab - 12, model.n_vocab, 20).tolist()
        dry = llama_cpp.llama_sampler_chain_get(chain.sampler, 1)
        for token in text:
            llama_cpp.llama_sampler_accept(dry, token)
        for _ in range(80):
            logits = rng.normal(size=model.n_vocab).astype(np.single)
            logits[:-12] -= 20
            tokens = np.array(text, np.intc)
            token = ours.sample(logits, tokens)
            assert token == drawn_by(chain, logits)
            n_different += token != plain.sample(logits, tokens)
            chain.accept(token)
            text.append(token)
    assert n_different > 500


def favourite(model: Model, text: list[int], **settings: Any) -> int:
    """The token drawn where token 7 is the likeliest one, and 9 nearly."""
    logits = np.zeros(model.n_vocab, np.single)
    logits[[7, 9]] = 1.0, 0.9
    draws = Sampling(**FLAT, dry_multiplier=1.0, **settings)
    return Sampler(model, draws).sample(logits, np.array(text, np.intc))


@pytest.mark.parametrize(
    ("far", "last_n", "expected"),
    [(20, -1, 9), (WINDOW, -1, 7), (20, 10, 7), (20, 30, 9), (WINDOW, 10**6, 7), (20, 0, 7)],
)
def test_dry_sees_the_newest_tokens_up_to_the_window(
    model: Model, far: int, last_n: int, expected: int
) -> None:
    between = list(range(100, 100 + far))
    text = [5, 6, 7, *between, 5, 6]
    assert favourite(model, text, dry_penalty_last_n=last_n) == expected


def test_a_long_text_is_not_gone_through_for_every_token(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    accept = llama_cpp.llama_sampler_accept

    def count(sampler: Any, token: int) -> None:
        told.append(token)
        accept(sampler, token)

    monkeypatch.setattr(llama_cpp, "llama_sampler_accept", count)
    sampler = Sampler(model, Sampling(**FLAT, dry_multiplier=1.0))
    logits = np.zeros(model.n_vocab, np.single)
    for n_tokens, expected in ((100_000, WINDOW), (100_001, 1), (100_004, 3)):
        told.clear()
        sampler.sample(logits, np.ones(n_tokens, np.intc))
        assert len(told) == expected


def test_repetitions_end_at_breakers(model: Model) -> None:
    [comma] = model.tokenize(b",", add_bos=False, special=False)[-1:]
    text = [5, comma, 7, 11, 12, 5, comma]
    assert favourite(model, text) == 9
    assert favourite(model, text, dry_sequence_breakers=[","]) == 7
    assert favourite(model, text, dry_sequence_breakers=[""]) == 9


def test_xtc_drops_what_is_likeliest(model: Model) -> None:
    logits = np.full(model.n_vocab, -20, np.single)
    logits[[3, 4, 5]] = 3, 2, 1
    drawn = []
    for probability in (0.0, 1.0):
        sampler = Sampler(model, Sampling(repeat_penalty=1.0, xtc_probability=probability))
        drawn.append({sampler.sample(logits, np.zeros(1, np.intc)) for _ in range(100)})
    assert drawn == [{3, 4, 5}, {4, 5}]
