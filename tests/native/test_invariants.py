"""The invariants of the design hold for any text."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import EvictedError
from tiny_llama import stored_as, tiny_llama, tiny_parent

N_LAYER, N_HEAD_KV = 3, 2
PAIRS = [(layer, head) for layer in range(N_LAYER) for head in range(N_HEAD_KV)]
MODEL = {"seed": 5, "n_layer": N_LAYER}


def kept(llm: Llama) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """Return positions and scores of every (layer, KV head)."""
    result = {}
    for layer in range(N_LAYER):
        positions, scores = llm.kv_rows(layer)
        for head in range(N_HEAD_KV):
            result[layer, head] = positions[head], scores[head]
    return result


def text(llm: Llama, rng: np.random.Generator, n: int) -> list[int]:
    tokens: list[int] = rng.integers(0, llm.n_vocab(), n).tolist()
    return tokens


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_capacity_and_budget_are_never_exceeded(
    path: Path, rng: np.random.Generator, kv_type: str
) -> None:
    llm = tiny_llama(
        path,
        hh=20,
        recent=10,
        pinned=3,
        slack=8,
        **stored_as(kv_type),
    )
    empty = llm.kv
    compactions = 0
    for token in text(llm, rng, 300):
        llm.eval([token])
        now = llm.kv
        assert now.used <= now.capacity == 41
        if now.compactions > compactions:
            # after a compaction: the budget, and the token that triggered it
            assert now.used == now.budget + 1 == 34
        compactions = now.compactions
        assert now.bytes_total == empty.bytes_total
        assert now.used + now.tokens_evicted == llm.n_tokens
        assert now.rows_evicted == now.tokens_evicted * len(PAIRS)
    assert compactions == (300 - 41 + 7) // 8


@pytest.mark.parametrize("flash_attn", [False, True])
def test_a_budget_that_covers_the_text_changes_nothing(
    path: Path, rng: np.random.Generator, flash_attn: bool
) -> None:
    evicting = tiny_llama(
        path,
        n_ctx=512,
        hh=256,
        recent=256,
        attention="ops",
        flash_attn=flash_attn,
        logits_all=True,
    )
    plain = tiny_parent(path, n_ctx=512, flash_attn=flash_attn, logits_all=True)
    tokens = text(evicting, rng, 200)
    evicting.eval(tokens)
    plain.eval(tokens)
    np.testing.assert_array_equal(evicting.scores[:200], plain.scores[:200])
    sampled = []
    for llm in (evicting, plain):
        llm.reset()
        llm.set_seed(11)
        sampled.append([*islice(llm.generate(tokens[:30], temp=1.0), 200)])
    assert sampled[0] == sampled[1]


def test_scores_count_the_queries_seen(path: Path, rng: np.random.Generator) -> None:
    llm = tiny_llama(path, n_ctx=512, hh=250, recent=250)
    for n in (1, 2, 60, 137):
        llm.eval(text(llm, rng, n))
        for _, scores in kept(llm).values():
            assert scores.min() >= 0
            assert scores.sum() == pytest.approx(llm.n_tokens, rel=1e-4)


def test_removing_a_tail_to_evicted_rows_is_refused(path: Path, rng: np.random.Generator) -> None:
    llm = tiny_llama(path, hh=10, recent=10, slack=4)
    llm.eval(text(llm, rng, 100))
    llm.n_tokens = 50
    with pytest.raises(EvictedError, match="cannot truncate the text to 50 tokens"):
        llm.eval([1])
    llm.reset()
    llm.eval(text(llm, rng, 5))
    assert llm.kv.used == 5
