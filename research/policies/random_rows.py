"""Random selection as a baseline for policies, and NACL, which samples some of the rows.

pyh2o generate --policy research/policies/random_rows.py:RandomRows
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyh2o.policies import FloatArray, HeadRows, Need, Policy, parameter
from pyh2o.policies.base import LARGEST_COUNT, SAFE_SCORE

UIntArray = npt.NDArray[np.uint64]

LARGEST_SEED = 2**64 - 1


@dataclass(frozen=True)
class RandomRows(Policy):
    """Keeps a random sample of the text, a different one in every (layer, KV head).

    Source: none needed; other collections of policies have it as the check that scores matter
    (NVIDIA/kvpress, `kvpress/presses/random_press.py`).

    Needs only positions.

    Deviations: kvpress samples again each time. Here a row's number is a hash of its location, the
    same at every compaction. So the kept rows are a uniform sample of all rows before the recent
    ones, and a run can be repeated.

    Attributes:
        seed: of the random numbers.
    """

    seed: int = parameter(0, least=0, most=LARGEST_SEED)

    def score(self, rows: HeadRows) -> FloatArray:
        return uniform_numbers(self.seed, rows.layer, rows.head, rows.positions)


@dataclass(frozen=True)
class NACL(Policy):
    """Keeps the rows with most attention of the last queries, and samples some of the others.

    The best rows are kept except for a share of the budget, for which the others are sampled with
    the probabilities of a softmax over the attention sums. The largest of s + g, with g from a
    standard Gumbel distribution, are such a sample without replacement.

    Source: Chen et al., "NACL: a general and effective KV cache eviction framework for LLMs at
    inference time", ACL 2024; PaddlePaddle/Research, `NLP/ACL2024-NACL/src/llama_nacl_patch.py`.

    Needs the same inputs as `snap`.

    Deviations: the authors evict once, after the prompt, with the last 1 % of it as queries and
    shares of the prompt (12 % by score, 7 % sampled, hence 0.37); here every compaction does, with
    a count of queries. Theirs samples with a generator without a seed; here a row's number is a
    hash of its location, the same at every compaction, so a run can be repeated. Their sums are of
    an attention without a causal mask among the last queries. Sums of a few queries are small as
    logits, so sampling is nearly uniform, as theirs.

    Attributes:
        queries: last queries that count; the recent window may have fewer.
        random: sampled share of the rows.
        seed: of the random numbers.
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


def splitmix64(x: UIntArray) -> UIntArray:
    """Hash 64 bits: [n] to [n], modulo 2**64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UIntArray = x ^ (x >> np.uint64(31))
    return mixed


def uniform_numbers(
    seed: int, layer: int, head: int, positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return a number between 0 and 1 for each row of a (layer, KV head): a hash of its location.

    Examples:

        seed, layer, head, position    number
        0, 0, 0, 0                     0.13870941014555432
        0, 0, 0, 1                     0.2582654469187294
        7, 3, 1, 1000                  0.6620748756001482
        2**64 - 1, 29, 2, 2**31 - 1    0.9703577962244319

    Only the sum of seed and layer matters: incrementing the seed gives each layer the numbers that
    the next layer had.

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
    # A float64 holds the upper 53 bits; the half excludes 0, which has no logarithm.
    numbers: npt.NDArray[np.float64] = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return numbers
