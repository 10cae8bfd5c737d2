"""Row selection by several threads."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np

from pyh2o import Llama
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


def test_any_number_of_threads_keeps_the_same_rows(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The heads are divided among threads; 64 heads of 4,200 rows are enough for two threads."""
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
    with tiny_llama(path, n_ctx=8192, hh=2000, recent=2000, slack=200, n_batch=512) as llm:
        llm.eval(tokens[:capacity])
        state = llm.kv_state()
        kept = []
        for n_threads in (1, 2):
            llm.load_kv_state(state, tokens[:capacity])
            llama_cpp.llama_set_n_threads(llm.ctx, n_threads, n_threads)
            llm.eval(tokens[capacity:])
            assert llm.kv.compactions == 1
            kept.append(positions_of(llm))
    assert kept[0] == kept[1]


def positions_of(llm: Llama) -> list[list[int]]:
    """Return the positions of every layer and KV head."""
    layers = [llm.kv_rows(layer)[0] for layer in range(8)]
    return [positions.tolist() for layer in layers for positions in layer]
