"""Policies that score rows by collected attention: H2O, its variants and RoCo."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..errors import SettingsError
from .base import SAFE_SCORE, FloatArray, HeadRows, Need, Policy, parameter

# The best half-life grows with the number of rows: measured at 256 and at 1,600 rows.
TOKENS_PER_ROW = 1.5


@dataclass(frozen=True)
class H2O(Policy):
    """Keeps the heavy hitters: the rows that have collected most attention since they were written.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle", NeurIPS 2023
    (https://arxiv.org/abs/2306.14048), as in the authors' cache that drops rows (FMInference/H2O,
    `h2o_hf/utils_real_drop/modify_llama.py`, class `H2OKVCache_LayerWise`).

    Cost: one sum per row and query, and one sort per compaction.

    Deviations: sums are float32 (the authors' float16 loses small additions); with grouped-query
    attention, sums are over the mean of the group (the authors' code has no groups); first
    positions can be pinned; rows are evicted when the slack is full, not one by one (slack 1 is the
    authors' algorithm); of equal scores, the newer row is kept (unspecified by the authors). As in
    the paper, sums favour old rows, which more queries have attended to; see `h2o-mean`.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.attention


@dataclass(frozen=True)
class H2OMean(Policy):
    """Keeps the rows that collected most attention per query since they were written.

    Unlike a sum, the mean does not favour old rows. It ranks a new row highly after few queries.

    Source: `h2o` with the denominator of ObservedAttention (NVIDIA/kvpress,
    `kvpress/presses/observed_attention_press.py`) and of cold-compress
    (AnswerDotAI/cold-compress, `cache.py`, class `KVCacheHeavyHitter`).

    Cost: as `h2o`.

    Deviations: kvpress protects no recent rows; the paper (appendix B.2) reports worse results for
    averaging. The number of queries follows from the position of a row, so a tail that was removed
    and generated again counts once, although the sum includes its attention twice.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    def score(self, rows: HeadRows) -> FloatArray:
        mean: FloatArray = rows.attention / rows.ages
        return mean


@dataclass(frozen=True)
class H2ODecay(Policy):
    """Keeps the rows that collected most attention, with exponential decay.

    Each compaction, after selecting rows, multiplies all sums by 0.5 ** (m / half_life), where m is
    the number of tokens since the last compaction or the start of the text.

    Source: `h2o` with the decay of other implementations (rajveer43/VeloxQuant-MLX: 0.98 per
    token).

    Cost: as `h2o`, and one multiplication per row and compaction.

    Deviations: the paper has no decay. Here it applies at compactions, so that attention since the
    last one counts in full; with slack 1 it applies at every token.

    Attributes:
        half_life: number of tokens after which attention counts for half.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    half_life: float = parameter(256.0, least=0, above=True)

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.attention


@dataclass(frozen=True)
class H2OFar(Policy):
    """Keeps the rows that collect most attention from distant queries, per such query.

    Nearly every token receives attention from the few tokens after it. That attention predicts
    little about later use, but dominates the sums of new rows, which then displace others. This
    policy ignores attention from less than `near` tokens away. It averages the rest over the
    distant queries, with exponential decay in the sum and in the number of queries.

    Source: our own, from measurements: `h2o-mean` without near attention and with the decay of
    `h2o-decay`, but per token. docs/measurements/quality.md compares it with all others.

    Cost: as `h2o`, and one weight per row and query, shared by all layers and heads.

    Deviations: `near` is limited by the recent window. After a tail was removed and generated
    again, rows that had left the recent window at the last compaction count as distant.

    Attributes:
        near: tokens.
        half_life: number of tokens after which attention counts for half; 0 for `TOKENS_PER_ROW`
            times the rows of the budget.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    near: int = parameter(64, least=1)
    half_life: float = parameter(0.0, least=0)

    @property
    def n_near(self) -> int:
        return self.near

    def for_budget(self, rows: int) -> H2OFar:
        return self if self.half_life > 0 else replace(self, half_life=TOKENS_PER_ROW * rows)

    def score(self, rows: HeadRows) -> FloatArray:
        if self.half_life == 0:
            raise SettingsError("h2o-far: half_life is 0: call for_budget() first")
        rate = math.log(2) / self.half_life
        n_far = np.maximum(rows.ages - min(self.near, rows.n_recent), 1)
        mean: FloatArray = rows.attention * np.expm1(-rate) / np.expm1(-n_far * rate)
        return mean


@dataclass(frozen=True)
class RoCo(Policy):
    """Keeps the rows whose attention varies most, then those with the highest mean attention.

    A row with strong attention from few queries has a low mean and a high standard deviation: later
    queries may need it again.

    Source: Ren and Zhu, "On the efficacy of eviction policy for key-value constrained generative
    language model inference", 2024 (https://arxiv.org/abs/2402.06262); DRSY/EasyKV,
    `easykv/easykv.py`, policy `roco`.

    Cost: two sums per row and query, of the attention and its square.

    Deviations: EasyKV guards a share of the whole budget, which includes the newest 10 rows; here
    all recent rows are kept anyway, and the share is of the rest. EasyKV evicts, for each token,
    the row with the lowest mean among those of low deviation, which is the same rule. It squares
    the mean over the group; here squares are averaged. It counts queries per row; here the number
    follows from the position (see `h2o-mean`).

    Attributes:
        guard: share of the competing rows kept for their deviation.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention", "squares")

    guard: float = parameter(0.3, least=0, most=1)

    def score(self, rows: HeadRows) -> FloatArray:
        mean = rows.attention / rows.ages
        # rounding can make a variance of 0 negative
        deviation = np.sqrt(np.maximum(0, rows.squares / rows.ages - mean**2))
        scores: FloatArray = mean.copy()
        scores[rows.best(deviation, math.floor(self.guard * rows.n_places))] = SAFE_SCORE
        return scores
