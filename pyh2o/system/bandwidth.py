"""How fast this machine's memory can be read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# Larger than any processor's caches.
BYTES = 512 * 2**20
TRIES = 5


def bytes_per_second(threads: int, *, size: int = BYTES, tries: int = TRIES) -> float:
    """The best of some readings of a large array by so many threads at once.

    Args:
        threads: each reads a part of its own; NumPy's `max` does not hold the interpreter's lock.
        size: bytes of the array.
        tries: readings.
    """
    # Pages that were never written are all one page of zeros, which is in the processor's cache.
    array = np.ones(size // 4, dtype=np.float32)
    parts = np.array_split(array, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.max, parts))  # starts the threads
        for _ in range(tries):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - started)
    return array.nbytes / best
