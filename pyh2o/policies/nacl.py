"""NACL: the attention of the last queries, and a share of rows that are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .base import LARGEST_COUNT, SAFE_SCORE, FloatArray, HeadRows, Need, Policy, parameter
from .hashing import LARGEST_SEED, uniform_numbers


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
