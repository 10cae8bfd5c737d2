"""Memory bandwidth of this machine."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# Larger than any processor's caches.
BYTES = 512 * 2**20
TRIES = 5


def bytes_per_second(threads: int, *, size: int = BYTES, tries: int = TRIES) -> float:
    """Measure how fast `threads` read a large array; return the best of several tries.

    NumPy's `max` does not hold the interpreter's lock.
    """
    # pages that were never written share one page of zeros, which stays in the processor's cache
    array = np.ones(size // 4, dtype=np.float32)
    parts = np.array_split(array, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.max, parts))  # start the threads
        for _ in range(tries):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - started)
    return array.nbytes / best
