"""Texts that are read and written at the same time, each in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pyh2o import Llama
from pyh2o.engine import Engine
from tiny_llama import ONE_THREAD, PAPER

Result = TypeVar("Result")

PATIENCE = 60


def tiny_engine(path: Path, **settings: Any) -> Engine:
    """An engine with the settings of `tiny_llama`."""
    return Engine(str(path), **ONE_THREAD, **PAPER | settings)


def at_once(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """What each returns; all begin at once."""
    with ThreadPoolExecutor(len(works)) as threads:
        futures = [threads.submit(work) for work in works]
        return [future.result(PATIENCE) for future in futures]


def read_by_pieces(llm: Llama, pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """The logits behind each piece of a text; [n_pieces, n_vocab]."""
    logits = []
    for piece in pieces:
        llm.eval(piece)
        logits.append(llm.scores[llm.n_tokens - 1].copy())
    return np.array(logits)


def random_pieces(rng: np.random.Generator, n_vocab: int, n_tokens: int) -> list[list[int]]:
    """A text in pieces: first a prompt, then mostly single tokens."""
    pieces = [rng.integers(3, n_vocab, int(rng.integers(1, n_tokens // 2))).tolist()]
    while sum(map(len, pieces)) < n_tokens:
        size = int(rng.choice([1, 1, 1, 1, 7]))
        pieces.append(rng.integers(3, n_vocab, size).tolist())
    return pieces
