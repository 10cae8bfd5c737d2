"""Numbers that look random and are the same on every machine and at every compaction."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UIntArray = npt.NDArray[np.uint64]

LARGEST_SEED = 2**64 - 1


def splitmix64(x: UIntArray) -> UIntArray:
    """Mix 64 bits: [n] to [n] (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014). Arithmetic is modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UIntArray = x ^ (x >> np.uint64(31))
    return mixed


def uniform_numbers(
    seed: int, layer: int, head: int, positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Numbers between 0 and 1, one for each row of a (layer, KV head): a hash of where it is.

    Its values:

        seed, layer, head, position    number
        0, 0, 0, 0                     0.13870941014555432
        0, 0, 0, 1                     0.2582654469187294
        7, 3, 1, 1000                  0.6620748756001482
        2**64 - 1, 29, 2, 2**31 - 1    0.9703577962244319

    Seed and layer enter as their sum: a seed that is larger by 1 gives each layer the numbers that
    the next one had.

    Args:
        seed: 0 .. 2**64 - 1.
        layer: number in the model.
        head: KV head of the layer.
        positions: [n] token positions.

    Returns:
        [n].
    """
    x = np.full(positions.shape, seed, dtype=np.uint64)
    for part in (np.uint64(layer), np.uint64(head), positions.astype(np.uint64)):
        x = splitmix64(x + part)
    # The upper 53 bits are what a float64 can hold; the half keeps 0 out, whose logarithm is none.
    numbers: npt.NDArray[np.float64] = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return numbers
