"""`Llama` on a tiny model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, get_args

import llama_cpp
import numpy as np

from pyh2o import Llama
from pyh2o.cache.settings import Attention
from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import SettingsError

N_VOCAB = 384

# A thread that waits for its core delays all others, which is slow on a loaded machine.
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}


def stored_as(kv_type: str) -> dict[str, int]:
    """Return settings of the type of K and V rows."""
    return {"type_k": KV_TYPES[kv_type], "type_v": KV_TYPES[kv_type]}


# Unrounded rows, as in the reference.
EXACT_ROWS = stored_as("f32")


# The paper's algorithm, as in the reference.
PAPER: dict[str, Any] = {"policy": "h2o", "recall": 0}


def tiny_llama(path: Path, *, verbose: bool = False, **settings: Any) -> Llama:
    """Return our class, with the paper's algorithm by default."""
    return Llama(str(path), verbose=verbose, **ONE_THREAD | PAPER | settings)


@functools.cache
def kernels_here(path: Path) -> tuple[Attention, ...]:
    """Return the one-op attention kernels that this machine can run."""
    return tuple(kind for kind in get_args(Attention)[2:] if _runs_here(path, kind))


def exact_kernels(path: Path) -> tuple[Attention, ...]:
    """Return the kernels that multiply unrounded inputs."""
    return tuple(kind for kind in kernels_here(path) if kind != "avx512bf16")


def _runs_here(path: Path, attention: Attention) -> bool:
    try:
        tiny_llama(path, hh=8, recent=8, attention=attention).close()
    except SettingsError:
        return False
    return True


def tiny_parent(path: Path, **settings: Any) -> llama_cpp.Llama:
    """Return llama_cpp's class, without eviction."""
    return llama_cpp.Llama(str(path), verbose=False, **ONE_THREAD, **settings)


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    """Return the tokens of a text."""
    tokens: list[int] = rng.integers(3, N_VOCAB, n).tolist()
    return tokens


def assert_same_cache(one: Llama, other: Llama) -> None:
    """Compare rows and scores bit for bit."""
    assert one.n_tokens == other.n_tokens
    for layer in range(one.text.n_layer):
        for mine, others in zip(one.kv_rows(layer), other.kv_rows(layer), strict=True):
            np.testing.assert_array_equal(mine, others)


COUNTED = (
    *("used", "position", "compactions", "rows_evicted", "rows_moved", "rebases"),
    *("archived", "unarchived", "found_share"),
)


def assert_same_future(one: Llama, other: Llama, tokens: list[int], *, chunk: int = 5) -> None:
    """Compare logits, rows, scores, retrieved rows and statistics bit for bit."""
    for llm in (one, other):
        llm.text.cache.reset_found()
    for i in range(0, len(tokens), chunk):
        for llm in (one, other):
            llm.eval(tokens[i : i + chunk])
    last = slice(one.n_tokens - len(tokens), one.n_tokens)
    np.testing.assert_array_equal(one.scores[last], other.scores[last])
    assert_same_cache(one, other)
    found = [llm.text.cache.found(llm.n_tokens) for llm in (one, other)]
    np.testing.assert_array_equal(*found)
    for name in COUNTED:
        assert getattr(one.kv, name) == getattr(other.kv, name), name
