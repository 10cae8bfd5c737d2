"""The native selection against the NumPy one, on random rows."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np

from pyh2o import Llama
from pyh2o.cache.settings import Budget
from pyh2o.reference import select as reference_select
from random_cases import Cases
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


def test_native_and_reference_keep_the_same_rows(cases: Cases) -> None:
    from pyh2o.cache.kv_cache import select

    for _, rng in cases(range(200)):
        n_rows = int(rng.integers(0, 60))
        positions = rng.choice(100, n_rows, replace=False).astype(np.int32)
        # few distinct values, so that equal scores are common
        scores = rng.integers(0, 8, n_rows).astype(np.float32) / 4
        heavy, pinned = (int(n) for n in rng.integers(0, 20, 2))
        recent = int(rng.integers(1, 20))

        budget = Budget(window=100, heavy=heavy, recent=recent, pinned=pinned, slack=1)
        expected = np.zeros(n_rows, dtype=np.bool_)
        expected[
            reference_select(
                scores, positions.astype(np.int64), pinned=pinned, heavy=heavy, recent=recent
            )
        ] = True
        np.testing.assert_array_equal(select(scores, positions, budget), expected)


def test_threads_that_choose_together_keep_the_same_rows(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The rows of many heads are shared out; 64 heads of 4,200 rows are enough for two threads."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        seed=3,
        n_layer=8,
        n_head=8,
        n_head_kv=8,
        head_size=16,
        n_ctx_train=8192,
    )
    capacity = 4200
    tokens: list[int] = rng.integers(0, 384, capacity + 1).tolist()

    def kept_with(n_threads: int) -> list[list[int]]:
        with tiny_llama(path, n_ctx=8192, hh=2000, recent=2000, slack=200, n_batch=512) as llm:
            llm.eval(tokens[:capacity])
            # from here on, so that all that was computed before is the same
            llama_cpp.llama_set_n_threads(llm.ctx, n_threads, n_threads)
            llm.eval(tokens[capacity:])
            assert llm.kv.compactions == 1
            return positions_of(llm)

    assert kept_with(2) == kept_with(1)


def positions_of(llm: Llama) -> list[list[int]]:
    """Of every layer and KV head."""
    layers = [llm.kv_rows(layer)[0] for layer in range(8)]
    return [positions.tolist() for layer in layers for positions in layer]
