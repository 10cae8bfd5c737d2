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

# A thread that has to wait for its core makes all others wait: slow, where anything else runs.
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}


def stored_as(kv_type: str) -> dict[str, int]:
    """Settings: the type of the K and V rows."""
    return {"type_k": KV_TYPES[kv_type], "type_v": KV_TYPES[kv_type]}


# Rows as the reference has them.
EXACT_ROWS = stored_as("f32")


# The paper's algorithm, as the reference has it.
PAPER: dict[str, Any] = {"policy": "h2o", "recall": 0}


def tiny_llama(path: Path, *, verbose: bool = False, **settings: Any) -> Llama:
    """Our class, with the paper's algorithm, unless told otherwise."""
    return Llama(str(path), verbose=verbose, **ONE_THREAD | PAPER | settings)


@functools.cache
def kernels_here(path: Path) -> tuple[Attention, ...]:
    """The kinds of attention in one op that this machine can run."""
    return tuple(kind for kind in get_args(Attention)[2:] if _runs_here(path, kind))


def exact_kernels(path: Path) -> tuple[Attention, ...]:
    """Those of them that round nothing before they multiply it."""
    return tuple(kind for kind in kernels_here(path) if kind != "avx512bf16")


def _runs_here(path: Path, attention: Attention) -> bool:
    try:
        tiny_llama(path, hh=8, recent=8, attention=attention).close()
    except SettingsError:
        return False
    return True


def tiny_parent(path: Path, **settings: Any) -> llama_cpp.Llama:
    """llama_cpp's class, which knows no eviction."""
    return llama_cpp.Llama(str(path), verbose=False, **ONE_THREAD, **settings)


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    """Of a text."""
    tokens: list[int] = rng.integers(3, N_VOCAB, n).tolist()
    return tokens


def assert_same_cache(one: Llama, other: Llama) -> None:
    """Bit for bit the same rows and scores."""
    assert one.n_tokens == other.n_tokens
    for layer in range(one.text.n_layer):
        for mine, others in zip(one.kv_rows(layer), other.kv_rows(layer), strict=True):
            np.testing.assert_array_equal(mine, others)


COUNTED = (
    *("used", "position", "compactions", "rows_evicted", "rows_moved", "rebases"),
    *("archived", "unarchived", "found_share"),
)


def assert_same_future(one: Llama, other: Llama, tokens: list[int], *, chunk: int = 5) -> None:
    """Bit for bit: logits, rows, scores, what is found, and what the statistics count."""
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
