"""`Llama` on a tiny model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, get_args

import llama_cpp

from pyh2o import Llama
from pyh2o.cache.settings import Attention
from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import SettingsError

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
    return Llama(str(path), verbose=verbose, **ONE_THREAD, **PAPER | settings)


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
