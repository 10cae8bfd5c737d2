"""One-bit codes of archived keys, to estimate which keys a query would attend to.

Source: RaBitQ (Gao and Long, SIGMOD 2024, https://arxiv.org/abs/2405.12497) for the estimate of a
product from signs. Computing it per page, around the mean of a page's keys, is ours, and so are the
integer tables, with which a processor looks up many rows at once.

The keys are rotated to the places of their pages, so queries need no rotation. A key k of a page
with centre c is k = c + (k - c). The difference, mixed by a Hadamard transform H so that no element
dominates, is stored as its signs and one scale:

    q . k  is about  q . c + scale * (H q . signs),   scale = |r|^2 / sum |r|,   r = H (k - c)

With this scale it is exact for a query parallel to the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
BoolArray = npt.NDArray[np.bool_]

GROUP = 4  # elements whose signs form one table index
LARGEST = 63  # largest table entry: the sum of four fits a byte

# [16, GROUP] the signs of each index: bit i is set if element i is not negative
SIGNS = np.array([[1 if index >> i & 1 else -1 for i in range(GROUP)] for index in range(16)])


@dataclass(frozen=True)
class PageCodes:
    """Codes of the keys of one page in one KV head, a function of those keys alone.

    Attributes:
        centre: [head_size] float16, their mean.
        positive: [n, head_size] whether r is not negative.
        scales: [n] float16.
    """

    centre: FloatArray
    positive: BoolArray
    scales: FloatArray


def hadamard(x: FloatArray) -> npt.NDArray[np.float64]:
    """Normalised Hadamard transform of x [..., size], in the largest possible blocks.

    The block size is the largest power of two that divides `size`.
    """
    size = x.shape[-1]
    matrix = np.ones((1, 1))
    while size % (2 * len(matrix)) == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, len(matrix))
    transformed: npt.NDArray[np.float64] = blocks @ matrix / np.sqrt(len(matrix))
    return transformed.reshape(x.shape)


def encode(keys: FloatArray) -> PageCodes:
    """Encode the keys [n, head_size] of a page, rotated to its place."""
    keys = keys.astype(np.float64)
    centre = keys.mean(axis=0).astype(np.float16)
    rotated = hadamard(keys - centre)
    sums = np.abs(rotated).sum(axis=-1)
    squares = (rotated**2).sum(axis=-1)
    scales = np.divide(squares, sums, out=np.zeros_like(sums), where=sums > 0)
    return PageCodes(centre, rotated >= 0, scales.astype(np.float16))


def estimates(pages: Sequence[PageCodes], queries: FloatArray) -> npt.NDArray[np.float64]:
    """Return [n_queries, n] estimated products of queries and the keys of some pages.

    Every query has a table for every four elements: the contribution of each combination of their
    signs to H q . signs, counted from the smallest, in integer steps of which the widest table has
    LARGEST. The tables are the same for all pages.

    Args:
        pages: codes of at least one page.
        queries: [n_queries, head_size], rotated.
    """
    groups = hadamard(queries).reshape(len(queries), -1, GROUP)
    most = np.abs(groups).sum(axis=-1)  # [n_queries, n_groups]; the smallest is -most
    steps = 2 * most.max(axis=-1) / LARGEST
    steps[steps == 0] = 1
    tables = np.rint((groups @ SIGNS.T + most[:, :, None]) / steps[:, None, None])

    positive = np.concatenate([page.positive for page in pages])
    indices = positive.reshape(len(positive), -1, GROUP) @ (1 << np.arange(GROUP))  # [n, n_groups]
    sums = tables[:, np.arange(indices.shape[1]), indices].sum(axis=-1)  # [n_queries, n]
    products = steps[:, None] * sums - most.sum(axis=-1, keepdims=True)

    scales = np.concatenate([page.scales for page in pages]).astype(np.float64)
    centres = np.stack([page.centre for page in pages]).astype(np.float64)
    of_centres = queries.astype(np.float64) @ centres.T  # [n_queries, n_pages]
    from_centre = np.repeat(of_centres, [page.scales.size for page in pages], axis=1)
    estimated: npt.NDArray[np.float64] = from_centre + scales * products
    return estimated
