"""Several sequences, each with its own stream of cells, in llama.cpp's batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from oracle import CLEAR_MARGIN, assert_same_rows, chose_clearly, rows_of
from pyh2o.cache.kv_cache import KVCache
from pyh2o.cache.settings import Budget, EvictionSettings
from pyh2o.errors import NativeError, SettingsError
from pyh2o.policies import H2O
from research.reference import ReferenceLlama
from some_policies import in_research
from streams import N_SEQ, Context

N_LAYER = 2
SETTINGS = EvictionSettings(pinned=1, policy=H2O())
BUDGET = Budget(SETTINGS, window=256, heavy=8, recent=6, slack=9)
MODEL = {"seed": 9, "n_layer": N_LAYER}


@pytest.fixture(params=[False, True], ids=["ops", "one op"])
def context(request: pytest.FixtureRequest, path: Path) -> Iterator[Context]:
    """Attention from llama.cpp's ops, or in one op of ours, which needs the other layout of V."""
    context = Context(path, flash_attention=request.param)
    yield context
    context.close()


def references(path: Path, policy: str = "h2o") -> list[ReferenceLlama]:
    return [
        ReferenceLlama.from_gguf(path, heavy=8, recent=6, pinned=1, slack=9, policy=policy)
        for _ in range(N_SEQ)
    ]


def compare(
    context: Context, expected: list[ReferenceLlama], *, margin: float = CLEAR_MARGIN
) -> None:
    """Compare if no choice was closer than rounding."""
    for seq, reference in enumerate(expected):
        if reference.smallest_margin > margin:
            assert_same_rows(context.of[seq].rows, rows_of(reference))


def test_each_sequence_keeps_its_own_rows(
    context: Context, path: Path, rng: np.random.Generator
) -> None:
    context.attach(BUDGET)
    expected = references(path)
    last_seq = N_SEQ - 1
    for _ in range(60):
        tokens = rng.integers(0, context.n_vocab, N_SEQ).tolist()
        chunks = {seq: (expected[seq].n_tokens, [tokens[seq]]) for seq in range(N_SEQ)}
        assert context.decode(chunks) == 0
        logits = [expected[seq].eval([tokens[seq]])[0] for seq in range(N_SEQ)]
        if chose_clearly(expected[last_seq]):
            np.testing.assert_allclose(context.last_logits(last_seq), logits[last_seq], atol=1e-4)
        compare(context, expected)
    assert expected[0].n_compactions > 3


@pytest.mark.parametrize(
    "policy",
    [
        "h2o-far:near=4,half_life=12",
        "roco",
        "snap:queries=4,pool=1",
        in_research("expected:Expected:queries=4"),
    ],
)
def test_policies_see_one_sequence(
    context: Context, path: Path, rng: np.random.Generator, policy: str
) -> None:
    """Their sums, queries and spans belong to one sequence, also in batches of several."""
    context.attach(replace(BUDGET, settings=replace(SETTINGS, policy=policy)))
    expected = references(path, policy)
    for _ in range(14):
        chunks = {}
        for seq, reference in enumerate(expected):
            tokens = rng.integers(0, context.n_vocab, 4).tolist()
            chunks[seq] = (reference.n_tokens, tokens)
            reference.eval(tokens)
        assert context.decode(chunks) == 0
        compare(context, expected, margin=1e-6)
    assert expected[0].n_compactions > 3


def test_one_sequence_can_be_cleared(
    context: Context, path: Path, rng: np.random.Generator
) -> None:
    context.attach(BUDGET)
    expected = references(path)
    for seq in range(N_SEQ):
        tokens = rng.integers(0, context.n_vocab, 50).tolist()
        assert context.decode({seq: (0, tokens)}) == 0
        expected[seq].eval(tokens)
    assert llama_cpp.llama_memory_seq_rm(context.memory, 1, 0, -1)
    expected[1].reset()
    tokens = rng.integers(0, context.n_vocab, 30).tolist()
    assert context.decode({1: (0, tokens)}) == 0
    expected[1].eval(tokens)
    compare(context, expected)


def test_removal_is_exact_or_refused(context: Context, rng: np.random.Generator) -> None:
    context.attach(BUDGET)
    assert context.decode({0: (0, rng.integers(0, context.n_vocab, 60).tolist())}) == 0
    first = context.of[0].counters().pos_removable
    assert first > 0
    rm = llama_cpp.llama_memory_seq_rm
    assert not rm(context.memory, 0, first - 1, -1)
    assert not rm(context.memory, 0, 10, 20)
    assert not rm(context.memory, 0, 1, -1)
    assert not rm(context.memory, -1, first - 1, -1)
    assert rm(context.memory, 0, 60, -1)
    assert rm(context.memory, 0, first, -1)
    assert context.decode({0: (first, [1, 2, 3])}) == 0
    assert rm(context.memory, 0, -1, -1)
    assert context.of[0].counters().n_used == 0


@pytest.mark.parametrize("operation", ["copy", "shift", "divide"])
def test_an_inexact_operation_stops_decoding_until_cleared(
    context: Context, operation: str, rng: np.random.Generator
) -> None:
    context.attach(BUDGET)
    tokens = rng.integers(0, context.n_vocab, 40).tolist()
    assert context.decode({0: (0, tokens)}) == 0
    if operation == "copy":
        llama_cpp.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
    elif operation == "shift":
        llama_cpp.llama_memory_seq_add(context.memory, 0, 20, -1, -5)
    else:
        llama_cpp.llama_memory_seq_div(context.memory, 0, 0, -1, 2)
    assert not llama_cpp.llama_memory_can_shift(context.memory)
    assert context.decode({0: (40, tokens[:1])}) != 0
    llama_cpp.llama_memory_clear(context.memory, True)
    assert context.decode({0: (0, tokens[:1])}) == 0


def test_shared_cells_are_refused(path: Path) -> None:
    context = Context(path, kv_unified=True)
    with pytest.raises(SettingsError, match="kv_unified = false"):
        context.attach(BUDGET)
    context.close()


def test_attaching_at_the_wrong_time_is_refused(context: Context) -> None:
    with pytest.raises(SettingsError, match="fewer cells than the capacity"):
        context.attach(Budget(EvictionSettings(), window=512, heavy=200, recent=200, slack=10))
    with pytest.raises(SettingsError, match="at least 1"):
        context.attach(Budget(EvictionSettings(), window=256, heavy=10, recent=0, slack=10))
    with pytest.raises(SettingsError, match="31 bits"):
        context.attach(Budget(EvictionSettings(), window=256, heavy=2**31, recent=2**31, slack=1))
    assert context.decode({0: (0, [1])}) == 0
    with pytest.raises(SettingsError, match="decoded tokens already"):
        context.attach(BUDGET)
    llama_cpp.llama_memory_clear(context.memory, True)
    context.attach(BUDGET)
    with pytest.raises(SettingsError, match="attached to this context already"):
        context.attach(BUDGET)
    with pytest.raises(NativeError, match=r"layer 2 is out of range \(0 to 1\)"):
        context.of[0].rows(N_LAYER)
    with pytest.raises(NativeError, match="out of range"):
        KVCache(context.address, N_SEQ, BUDGET, evicting=True)
