"""TOVA, SnapKV and NACL: policies that go by the attention of the last queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .base import LARGEST_COUNT, SAFE_SCORE, FloatArray, HeadRows, Need, Policy, parameter

UIntArray = npt.NDArray[np.uint64]

LARGEST_SEED = 2**64 - 1


@dataclass(frozen=True)
class TOVA(Policy):
    """Keeps the rows that the last query pays most attention to.

    Source: Oren et al., "Transformers are multi-state RNNs", 2024
    (https://arxiv.org/abs/2401.06104).

    Needs the last query of each head; a compaction computes its attention again. Nothing is
    collected between compactions.

    Deviations: the paper averages over all heads of a layer, so that they keep the same rows; here
    each KV head chooses by the mean over its own group. It protects only the newest row, here all
    recent rows are safe. If the tail of the text was removed and nothing was read since, the last
    query is not known: all rows score 0, and the newer ones stay.
    """

    needs: ClassVar[tuple[Need, ...]] = ("query_attention",)

    @property
    def n_queries(self) -> int:
        return 1

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.query_attention


@dataclass(frozen=True)
class Snap(Policy):
    """Keeps the rows, with their neighbours, that the last queries pay most attention to.

    Source: Li et al., "SnapKV: LLM knows what you are looking for before generation", 2024
    (https://arxiv.org/abs/2404.14469); NVIDIA/kvpress, `kvpress/presses/snapkv_press.py`.

    Needs the last queries of each head; a compaction computes their attention again, queries x rows
    dot products. Nothing is collected between compactions.

    Deviations: the paper compresses a prompt once, by its last queries, here every compaction does.
    Its window of queries is protected, here the recent rows are, of which the queries are at most
    as many. The queries see the cache as it is, also themselves, and earlier ones not the later
    rows; kvpress leaves the window out of what is pooled, which is the same here: pooling runs over
    the competing rows only, neighbours in the order of the text as far as they are left. The edges
    are means over the neighbours there are (kvpress counts missing ones as zeros).

    Attributes:
        queries: last queries that count; the recent window may have fewer.
        pool: neighbours that a score is the mean over, the row itself among them; odd.
    """

    needs: ClassVar[tuple[Need, ...]] = ("query_attention",)

    queries: int = parameter(32, least=1, most=LARGEST_COUNT)
    pool: int = parameter(5, least=1, most=LARGEST_COUNT, odd=True)

    @property
    def n_queries(self) -> int:
        return self.queries

    def score(self, rows: HeadRows) -> FloatArray:
        scores: FloatArray = rows.query_attention.astype(np.float64)
        scores[rows.competing] = _pooled(scores[rows.competing], self.pool)
        return scores


def _pooled(scores: FloatArray, pool: int) -> FloatArray:
    """[n] means over the `pool` neighbours around each; at the ends over those there are."""
    reach = min(pool // 2, scores.size)
    padded = np.pad(scores, reach)
    present = np.pad(np.ones(scores.size), reach)
    sums = np.zeros(scores.size)
    counts = np.zeros(scores.size)
    for shift in range(2 * reach + 1):
        sums += padded[shift : shift + scores.size]
        counts += present[shift : shift + scores.size]
    pooled: FloatArray = sums / counts
    return pooled


@dataclass(frozen=True)
class NACL(Policy):
    """Keeps the rows that the last queries pay most attention to, and draws some of the others.

    The best rows fill all places but a share, for which the others draw lots: the probability of
    each is that of a softmax over the attention sums. The largest of s + g, with g from a standard
    Gumbel distribution, are such a sample without replacement.

    Source: Chen et al., "NACL: a general and effective KV cache eviction framework for LLMs at
    inference time", ACL 2024; PaddlePaddle/Research, `NLP/ACL2024-NACL/src/llama_nacl_patch.py`.

    Needs what `snap` needs.

    Deviations: the authors evict once, after the prompt, with the last 1 % of it as queries and
    shares of the prompt (12 % by score, 7 % drawn, which is where 0.37 of the places comes from);
    here every compaction does, with a count of queries. Theirs draws anew with a generator that has
    no seed; here a row's number is a hash of where it is, so it has the same luck at every
    compaction and a run can be repeated. Their sums are of an attention without a causal mask among
    the last queries. Sums of a few queries are small as logits, so the draw is nearly uniform, as
    theirs.

    Attributes:
        queries: last queries that count; the recent window may have fewer.
        random: share of the places that are drawn.
        seed: of the draw.
    """

    needs: ClassVar[tuple[Need, ...]] = ("query_attention",)

    queries: int = parameter(32, least=1, most=LARGEST_COUNT)
    random: float = parameter(0.37, least=0, most=1)
    seed: int = parameter(0, least=0, most=LARGEST_SEED)

    @property
    def n_queries(self) -> int:
        return self.queries

    def score(self, rows: HeadRows) -> FloatArray:
        attention = rows.query_attention.astype(np.float64)
        numbers = uniform_numbers(self.seed, rows.layer, rows.head, rows.positions)
        scores: FloatArray = attention - np.log(-np.log(numbers))
        n_random = math.floor(self.random * rows.n_places)
        scores[rows.best(attention, rows.n_places - n_random)] = SAFE_SCORE
        return scores


# -------------------------------------------------------------------------------------------------
# Numbers that look random and are the same on every machine and at every compaction
# -------------------------------------------------------------------------------------------------


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
