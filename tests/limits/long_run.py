"""Read a million tokens in one run; check counters, memory and a saved state.

    python tests/limits/long_run.py --tokens 1000000

The model is tiny and random, so this takes a minute. It reads random tokens in chunks of 128, and
the last thousand one by one, with a small cache of each row type. The numbers of compactions and
re-bases must follow from the sizes, and memory must not grow. A loaded state must continue like the
saved text, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from pyh2o import Llama
from pyh2o.core.parameters import KV_TYPES

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from own_memory import own_bytes
from reference_rows import last_logits
from tiny_gguf import write_tiny_gguf

TYPES = ("f16", "q4_0")
# Chunks, compactions and re-bases fall at multiples of the slack.
N_TRAINED, HEAVY, RECENT, SLACK = 2048, 64, 64, 128
CAPACITY = HEAVY + RECENT + SLACK
N_LAYER, N_VOCAB, N_LOOKS, N_ALONE, N_AFTER = 2, 384, 10, 1000, 300
# The list of tokens: 4 bytes per token, and half as much again when it grows.
LEAST_GROWTH, GROWTH_A_TOKEN = 2 * 2**20, 16


def open_model(path: Path, kv_type: str) -> Llama:
    """Load the model with a small cache and one thread."""
    return Llama(
        str(path),
        n_ctx=512,
        hh=HEAVY,
        recent=RECENT,
        slack=SLACK,
        recall=0,
        type_k=KV_TYPES[kv_type],
        type_v=KV_TYPES[kv_type],
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )


def read(llm: Llama, tokens: list[int]) -> list[float]:
    """Read a text, its end token by token; return MiB of memory after each tenth of the rest."""
    body, end = tokens[:-N_ALONE], tokens[-N_ALONE:]
    stretch, used = -(-len(body) // N_LOOKS), []
    for start in range(0, len(body), stretch):
        llm.eval(body[start : start + stretch])
        used.append(own_bytes() / 2**20)
    for token in end:
        llm.eval([token])
    return used


def check_counters(llm: Llama, n_tokens: int) -> None:
    """Compare the counters with the numbers that follow from the sizes."""
    kv = llm.kv
    assert (llm.n_tokens, kv.position) == (n_tokens, n_tokens), kv
    assert kv.tokens_evicted == n_tokens - kv.used, kv
    assert kv.compactions == -(-(n_tokens - CAPACITY) // SLACK), kv
    assert kv.rebases == -(-(n_tokens - N_TRAINED) // (N_TRAINED // 2)), kv


def check_state(saved: Llama, path: Path, kv_type: str, more: list[int]) -> int:
    """Load the state into a new model, compare both, and return the size of the state."""
    state = saved.kv_state()
    with open_model(path, kv_type) as loaded:
        loaded.load_kv_state(state, saved.input_ids[: saved.n_tokens])
        for llm in (saved, loaded):
            llm.eval(more)
        assert np.array_equal(last_logits(saved), last_logits(loaded))
        for layer in range(N_LAYER):
            for mine, theirs in zip(saved.kv_rows(layer), loaded.kv_rows(layer), strict=True):
                assert np.array_equal(mine, theirs)
    return len(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    n_tokens = parser.parse_args().tokens
    tokens = np.random.default_rng(0).integers(3, N_VOCAB, n_tokens + N_AFTER).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_gguf(
            Path(folder) / "tiny.gguf",
            seed=1,
            n_layer=N_LAYER,
            n_ctx_train=N_TRAINED,
            n_vocab=N_VOCAB,
        )
        for kv_type in TYPES:
            with open_model(path, kv_type) as llm:
                began = time.perf_counter()
                used = read(llm, tokens[:n_tokens])
                seconds = time.perf_counter() - began
                check_counters(llm, n_tokens)
                growth = used[-1] - used[0]
                assert growth < (LEAST_GROWTH + GROWTH_A_TOKEN * n_tokens) / 2**20, used
                kv = llm.kv
                n_bytes = check_state(llm, path, kv_type, tokens[n_tokens:])
                print(
                    f"{kv_type}: {n_tokens:,} tokens in {seconds:,.0f} s, {kv.compactions:,} "
                    f"compactions, {kv.rebases:,} re-bases; memory after a tenth {used[0]:.1f} MiB "
                    f"and at the end {used[-1]:.1f}; a state of {n_bytes:,} bytes continues exactly"
                )


if __name__ == "__main__":
    main()
