"""Several sequences with recall: each retrieves rows from its own archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from oracle import assert_same_rows, clear_steps
from pyh2o.cache.settings import Budget, EvictionSettings
from pyh2o.policies import H2O
from research.reference import ReferenceLlama, as_float32
from streams import N_SEQ, Context

SLACK, RECALL = 27, 24
BUDGET = Budget(
    EvictionSettings(pinned=1, policy=H2O(), recall_type="f32"),
    window=256,
    heavy=10,
    recent=16,
    slack=SLACK,
    recall=RECALL,
)
# Tokens per sequence in a batch, at most SLACK in all: many queries, then few.
SIZES = [SLACK // N_SEQ] * 12 + [3] * 18


# One layer: retrieved rows of a second one would already differ by rounding.
MODEL: dict[str, Any] = {"seed": 9, "n_layer": 1}


@pytest.fixture(params=[False, True], ids=["ops", "one op"])
def context(request: pytest.FixtureRequest, path: Path) -> Iterator[Context]:
    context = Context(path, flash_attention=request.param)
    context.attach(BUDGET)
    yield context
    context.close()


def read(context: Context, rng: np.random.Generator, lengths: dict[int, int], size: int) -> None:
    """Read random texts of these lengths one after the other."""
    for seq, n in lengths.items():
        for first in range(0, n, size):
            tokens = rng.integers(0, context.n_vocab, min(size, n - first)).tolist()
            assert context.decode({seq: (first, tokens)}) == 0


def test_each_sequence_retrieves_only_its_own_rows(
    context: Context, path: Path, rng: np.random.Generator
) -> None:
    """In shared batches each sequence retrieves what the reference retrieves for its text alone."""
    rows = {"heavy": 10, "recent": 16, "pinned": 1, "slack": SLACK}
    texts = [
        clear_steps(
            ReferenceLlama.from_gguf(path, **rows, recall=RECALL, archive_rounding=as_float32),
            rng,
            SIZES,
        )[0]
        for _ in range(N_SEQ)
    ]
    for steps in zip(*texts, strict=True):
        chunks = {
            seq: (step.n_tokens - len(step.tokens), step.tokens) for seq, step in enumerate(steps)
        }
        assert context.decode(chunks) == 0
        np.testing.assert_allclose(context.last_logits(-1), steps[-1].logits[-1], atol=2e-4)
        for seq, step in enumerate(steps):
            assert_same_rows(context.of[seq].rows, step.rows, scores=1e-3)
            found = context.of[seq].found(step.n_tokens)
            np.testing.assert_allclose(found, step.found, atol=1e-4, rtol=1e-3)
            assert context.of[seq].counters().found == pytest.approx(step.found_share, abs=1e-5)
    assert steps[-1].found_share > 0.01


def test_clearing_a_sequence_keeps_the_others(context: Context, rng: np.random.Generator) -> None:
    read(context, rng, {0: 90, 1: 90}, SLACK)
    before = context.of[1].found(90)
    assert before.any()
    assert llama_cpp.llama_memory_seq_rm(context.memory, 0, 0, -1)
    cleared, other = context.of[0].counters(), context.of[1].counters()
    assert (cleared.n_used, cleared.n_archived, cleared.n_looked, cleared.found) == (0, 0, 0, 0)
    assert other.n_archived > 0
    assert not context.of[0].found(90).any()
    np.testing.assert_array_equal(context.of[1].found(90), before)
    context.of[1].reset_found()
    assert context.decode({0: (0, [1, 2, 3]), 1: (90, [1, 2, 3])}) == 0
    assert context.of[0].counters().found == 0 < context.of[1].counters().found


def test_a_state_of_all_sequences_continues_like_the_texts(
    path: Path, context: Context, rng: np.random.Generator
) -> None:
    """One sequence has no archive yet."""
    lengths = {0: 90, 1: 3, 2: 63}
    read(context, rng, lengths, 1)
    loaded = context.copied(path, BUDGET)
    for each in (context, loaded):
        for seq in lengths:
            each.of[seq].reset_found()
    for i in range(20):
        tokens = rng.integers(0, context.n_vocab, N_SEQ).tolist()
        for each in (context, loaded):
            chunks = {seq: (n + i, [tokens[seq]]) for seq, n in lengths.items()}
            assert each.decode(chunks) == 0
        for output in range(N_SEQ):
            np.testing.assert_array_equal(context.last_logits(output), loaded.last_logits(output))
    for seq, n in lengths.items():
        found = context.of[seq].found(n)
        np.testing.assert_array_equal(found, loaded.of[seq].found(n))
        assert found.any() == (n > 3)
    loaded.close()
