"""Several sequences with recall: each has an archive, a question and recalled rows of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from oracle import Step, assert_same_rows, clear_steps
from pyh2o.cache.settings import Budget, EvictionSettings
from pyh2o.policies import H2O
from pyh2o.reference import ReferenceLlama, as_float32
from streams import N_SEQ, Context
from tiny_gguf import write_tiny_gguf

SLACK, RECALL = 9, 24
BUDGET = Budget(
    EvictionSettings(pinned=1, policy=H2O(), recall_type="f32"),
    window=256,
    heavy=10,
    recent=16,
    slack=SLACK,
    recall=RECALL,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=9, n_layer=2)


@pytest.fixture(params=[False, True], ids=["ops", "one op"])
def context(request: pytest.FixtureRequest, path: Path) -> Iterator[Context]:
    context = Context(path, flash_attention=request.param)
    context.kv.attach(BUDGET)
    yield context
    context.close()


def steps_of(path: Path, rng: np.random.Generator, recalls: list[list[int]]) -> list[list[Step]]:
    """What the reference does with a text of each sequence."""
    return [
        clear_steps(
            ReferenceLlama.from_gguf(
                path,
                heavy=10,
                recent=16,
                pinned=1,
                slack=SLACK,
                recall_queries=32,
                archive_rounding=as_float32,
            ),
            rng,
            [SLACK] * len(mine),
            recall=mine,
        )[0]
        for mine in recalls
    ]


def test_sequences_recall_apart(context: Context, path: Path, rng: np.random.Generator) -> None:
    """In batches of all of them; one recalls while the others go on."""
    n_steps = 16
    recalls = [[-1] * n_steps for _ in range(N_SEQ)]
    recalls[0][8], recalls[0][11], recalls[1][9], recalls[1][12] = RECALL, 0, 7, RECALL
    texts = steps_of(path, rng, recalls)
    for i in range(n_steps):
        chunks = {
            seq: (steps[i].n_tokens - SLACK, steps[i].tokens) for seq, steps in enumerate(texts)
        }
        assert context.decode(chunks) == 0
        expected = texts[N_SEQ - 1][i].logits[-1]
        np.testing.assert_allclose(context.last_logits(-1), expected, atol=2e-4)
        for seq, steps in enumerate(texts):
            assert_same_rows(context.of[seq].rows, steps[i].rows, scores=1e-3)
            if recalls[seq][i] >= 0:
                context.of[seq].recall(recalls[seq][i])
            recalled = steps[i].recalled
            assert context.of[seq].counters().n_recalled == recalled.n_rows
            assert [span[:2] for span in context.of[seq].recalled()] == [
                (span.start, span.end) for span in recalled.spans
            ]


def test_clearing_one_leaves_the_others(context: Context, rng: np.random.Generator) -> None:
    for seq in range(2):
        for first in range(0, 90, SLACK):
            tokens = rng.integers(0, context.n_vocab, SLACK).tolist()
            assert context.decode({seq: (first, tokens)}) == 0
        assert context.of[seq].recall(RECALL) == RECALL
    spans = context.of[1].recalled()
    assert llama_cpp.llama_memory_seq_rm(context.memory, 0, 0, -1)
    cleared, other = context.of[0].counters(), context.of[1].counters()
    assert (cleared.n_used, cleared.n_recalled, cleared.n_archived) == (0, 0, 0)
    assert (other.n_recalled, context.of[1].recalled()) == (RECALL, spans)
    assert context.of[0].recall(RECALL) == 0
    assert context.of[1].recalled() == spans


def test_state_of_all_sequences(path: Path, context: Context, rng: np.random.Generator) -> None:
    """Save, load and go on equals go on, for each sequence; one has nothing recalled."""
    lengths = {0: 90, 1: 3, 2: 63}
    for seq, n in lengths.items():
        for first in range(n):
            token = int(rng.integers(0, context.n_vocab))
            assert context.decode({seq: (first, [token])}) == 0
    assert context.of[0].recall(RECALL) == RECALL
    loaded = context.copied(path, BUDGET)
    for i in range(20):
        tokens = rng.integers(0, context.n_vocab, N_SEQ).tolist()
        for each in (context, loaded):
            chunks = {seq: (n + i, [tokens[seq]]) for seq, n in lengths.items()}
            assert each.decode(chunks) == 0
            each.of[2].recall(RECALL)
        for output in range(N_SEQ):
            np.testing.assert_array_equal(context.last_logits(output), loaded.last_logits(output))
        for seq in range(N_SEQ):
            assert context.of[seq].recalled() == loaded.of[seq].recalled()
    loaded.close()
