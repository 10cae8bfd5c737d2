"""`Llama` on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp

from pyh2o import Llama

# A thread that has to wait for its core makes all others wait: slow, where anything else runs.
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}


def tiny_llama(path: Path, *, verbose: bool = False, **settings: Any) -> Llama:
    """Our class."""
    return Llama(str(path), verbose=verbose, **ONE_THREAD, **settings)


def tiny_parent(path: Path, **settings: Any) -> llama_cpp.Llama:
    """llama_cpp's class, which knows no eviction."""
    return llama_cpp.Llama(str(path), verbose=False, **ONE_THREAD, **settings)
