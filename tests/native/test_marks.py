"""Marks: removing a tail down to a mark also removes its attention from the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.cache.kv_cache import KVCache
from pyh2o.policies import POLICIES
from tiny_llama import assert_same_cache, random_tokens, stored_as, tiny_llama

N_LAYER, N_VOCAB, N_POS = 2, 384, 128
HEAVY, RECENT, SLACK = 14, 9, 20
FADES_FAST = "h2o-far:near=2,half_life=0.25"  # a few tokens span more half-lives than a float holds
MODEL: dict[str, Any] = {"seed": 6, "n_layer": N_LAYER, "head_size": 64, "n_ctx_train": N_POS}


def llama_of(path: Path, **settings: Any) -> Llama:
    values = {"policy": "h2o", "hh": HEAVY, "recent": RECENT, "slack": SLACK, "n_ctx": 200}
    llm = tiny_llama(path, logits_all=True, **{**values, **settings})
    llm.text.cache.mark = lambda: None  # type: ignore[method-assign]  # these tests set their own
    return llm


def cache_of(llm: Llama) -> KVCache:
    model = llm.text.model
    return KVCache(model.address, 0, model.limits, evicting=True)


def assert_same_text(one: Llama, other: Llama, tokens: list[int]) -> None:
    """Compare bit for bit, over compactions and re-bases."""
    for i in range(0, len(tokens), 7):
        chunk = tokens[i : i + 7]
        for llm in (one, other):
            llm.eval(chunk)
        last = slice(one.n_tokens - len(chunk), one.n_tokens)
        np.testing.assert_array_equal(one.scores[last], other.scores[last])
        assert_same_cache(one, other)


FAR: dict[str, Any] = {"policy": "h2o-far"}
WAYS = [
    *({"policy": policy} for policy in (*POLICIES, "h2o-decay:half_life=3", FADES_FAST)),
    {**FAR, **stored_as("q8_0")},
    {**FAR, "attention": "ops", "flash_attn": False},
    {**FAR, "flash_attn": True},
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_tail_removed_to_a_mark_leaves_no_trace(
    path: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """The first part ends anywhere between two compactions, before and after a re-base."""
    for n_first in (int(rng.integers(1, 15)), 90, 158):
        alone, other = (llama_of(path, **settings) for _ in range(2))
        first, more = random_tokens(rng, n_first), random_tokens(rng, 80)
        for llm in (alone, other):
            llm.eval(first)
        cache = cache_of(other)
        cache.mark()
        n_before = other.kv.compactions, other.kv.rebases
        for _ in range(2):
            other.eval(random_tokens(rng, int(rng.integers(1, other.text.room_in_batch() + 1))))
            assert (other.kv.compactions, other.kv.rebases) == n_before
            assert cache.marked(other.n_tokens) == n_first
            assert other.text.remove_tail(n_first)
        assert_same_cache(alone, other)
        assert_same_text(alone, other, more)
        alone.close()
        other.close()


def test_marks_can_be_nested(path: Path, rng: np.random.Generator) -> None:
    alone, other = (llama_of(path, policy="roco") for _ in range(2))
    first, second = random_tokens(rng, 30), random_tokens(rng, 4)
    for llm in (alone, other):
        llm.eval(first)
    cache = cache_of(other)
    cache.mark()
    other.eval(second)
    cache.mark()
    cache.mark()  # removing it again changes nothing
    assert [cache.marked(n) for n in (-1, 0, 29, 30, 33, 34, 999)] == [0, 0, 0, 30, 30, 34, 34]
    other.eval(random_tokens(rng, 3))
    other.text.remove_tail(34)
    alone.eval(second)
    assert_same_cache(alone, other)
    other.text.remove_tail(33)
    assert cache.marked(999) == 30
    other.text.remove_tail(30)
    alone = llama_of(path, policy="roco")
    alone.eval(first)
    assert_same_text(alone, other, random_tokens(rng, 60))


def test_only_the_newest_marks_are_kept(path: Path, rng: np.random.Generator) -> None:
    llm = llama_of(path)
    cache = cache_of(llm)
    cache.mark()  # an empty text needs no mark
    for _ in range(10):
        llm.eval(random_tokens(rng, 1))
        cache.mark()
    assert [cache.marked(n) for n in range(11)] == [0, 0, 0, *range(3, 11)]


def test_operations_that_drop_marks(path: Path, rng: np.random.Generator) -> None:
    llm = llama_of(path, prefill="exact")
    cache = cache_of(llm)

    def mark(n: int) -> None:
        llm.reset()
        llm.eval(random_tokens(rng, n))
        cache.mark()
        assert cache.marked(10**6) == n

    mark(43)
    llm.eval(random_tokens(rng, 1))  # a compaction
    assert cache.marked(10**6) == 0
    mark(20)
    llm.reset()
    assert cache.marked(10**6) == 0
    mark(20)
    assert llm.text.remove_tail(19)
    assert cache.marked(10**6) == 0
    mark(20)
    llm.load_kv_state(llm.kv_state(), llm.input_ids[:20])
    assert cache.marked(10**6) == 0
    mark(20)
    llm.eval(random_tokens(rng, 60))  # a temporarily larger cache
    assert cache.marked(10**6) == 0
    mark(20)
    assert llm._ctx.kv_cache_seq_rm(0, 5, 9)  # no tail
    assert cache.marked(10**6) == 0


def test_a_rebase_drops_the_marks(path: Path, rng: np.random.Generator) -> None:
    llm = llama_of(path, slack=100 - HEAVY - RECENT)
    cache = cache_of(llm)
    llm.eval(random_tokens(rng, 101))  # a compaction
    llm.eval(random_tokens(rng, N_POS - 101))
    cache.mark()
    assert (llm.kv.compactions, llm.kv.rebases) == (1, 0)
    llm.eval(random_tokens(rng, 1))
    assert (llm.kv.compactions, llm.kv.rebases) == (1, 1)
    assert cache.marked(10**6) == 0
