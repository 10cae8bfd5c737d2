"""H2O and its kind, and RoCo: policies that go by the attention that a row has collected."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..errors import SettingsError
from .base import SAFE_SCORE, FloatArray, HeadRows, Need, Policy, parameter

# A cache that keeps more rows can remember for longer: measured at 256 and at 1,600 rows.
TOKENS_PER_ROW = 1.5


@dataclass(frozen=True)
class H2O(Policy):
    """Keeps the heavy hitters: the rows that have collected most attention since they were written.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle", NeurIPS 2023
    (https://arxiv.org/abs/2306.14048), as in the authors' cache that really drops rows
    (FMInference/H2O, `h2o_hf/utils_real_drop/modify_llama.py`, class `H2OKVCache_LayerWise`).

    Needs one sum per row, added to at every query; a compaction costs a sort.

    Deviations: sums are float32 (theirs are float16, which loses small additions); with grouped
    query attention they are of the mean over the group (theirs knows no groups); first positions
    can be pinned; rows go when the slack is used up, not one by one (slack 1 is theirs); of equal
    scores the newer stays (theirs does not say). An old row was seen by more queries and has the
    larger sum for it, which is the paper's intention; see `h2o-mean`.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.attention


@dataclass(frozen=True)
class H2OMean(Policy):
    """Keeps the rows that collected most attention per query that could see them.

    A sum favours old rows, which more queries have seen; a mean is fair to all ages, and quick to
    give a young row a high place.

    Source: `h2o` with the denominator of ObservedAttention (NVIDIA/kvpress,
    `kvpress/presses/observed_attention_press.py`) and of cold-compress
    (AnswerDotAI/cold-compress, `cache.py`, class `KVCacheHeavyHitter`).

    Needs what `h2o` needs.

    Deviations: kvpress protects no recent rows; the paper (appendix B.2) reports that averaging did
    worse for it. Queries that saw a row are counted from its position, so a tail that was removed
    and said again is counted once, while its attention is in the sum twice.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    def score(self, rows: HeadRows) -> FloatArray:
        mean: FloatArray = rows.attention / rows.ages
        return mean


@dataclass(frozen=True)
class H2ODecay(Policy):
    """Keeps the rows that collected most attention, where attention of long ago counts for less.

    At each compaction, after the choice, all sums are multiplied by 0.5 ** (m / half_life), with m
    the tokens since the compaction before, or since the start of the text.

    Source: `h2o` with exponential forgetting, as other implementations have it
    (rajveer43/VeloxQuant-MLX: 0.98 per token).

    Needs what `h2o` needs; the multiplication is part of a compaction.

    Deviations: from the paper, which never forgets. The steps are those of the compactions:
    attention of the tokens since the last one counts in full. With slack 1 that is every token.

    Attributes:
        half_life: tokens after which attention counts for half.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    half_life: float = parameter(256.0, least=0, above=True)

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.attention


@dataclass(frozen=True)
class H2OFar(Policy):
    """Keeps the rows that collect most attention from afar, per query that could pay it.

    Nearly every token is attended to by the few that follow it. That says little about whether it
    will be needed again, but it is most of what a young row has collected, so that young rows take
    the places of others. Attention from less than `near` tokens away therefore does not count here.
    The rest is averaged over the queries that could see the row from afar, and attention of long
    ago counts for less, in the sum and in the number of queries alike.

    Source: our own, found by measuring; `h2o-mean` without what is near, and with the forgetting of
    `h2o-decay`, but token by token. In docs/measurements/quality.md it is compared with all others.

    Needs what `h2o` needs, and for every query one weight per row, the same for all layers and
    heads.

    Deviations: none from a paper. `near` is at most the recent window. Where a tail was removed and
    said again, rows that were not recent any more at the last compaction count as far away.

    Attributes:
        near: tokens.
        half_life: tokens after which attention counts for half; 0 for `TOKENS_PER_ROW` times the
            rows that are kept.
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
            raise SettingsError("h2o-far: half_life is open: for_budget() closes it")
        rate = math.log(2) / self.half_life
        n_far = np.maximum(rows.ages - min(self.near, rows.n_recent), 1)
        mean: FloatArray = rows.attention * np.expm1(-rate) / np.expm1(-n_far * rate)
        return mean


@dataclass(frozen=True)
class RoCo(Policy):
    """Keeps the rows whose attention varies most, and then those with the highest mean attention.

    A row that few queries look at, but those hard, has a low mean and a high standard deviation: it
    may be looked at again.

    Source: Ren and Zhu, "On the efficacy of eviction policy for key-value constrained generative
    language model inference", 2024 (https://arxiv.org/abs/2402.06262); DRSY/EasyKV,
    `easykv/easykv.py`, policy `roco`.

    Needs two sums per row, of the attention and of its square, added to at every query.

    Deviations: EasyKV guards a share of the whole budget, among which it counts the newest 10 rows;
    here all recent rows are safe anyway, and the share is of the places that are left. It evicts
    the lowest mean among the rows of low deviation, one for each token, which is the same rule. It
    squares the mean over the group; here it is the mean of the squares. It counts queries with a
    counter per row, here they follow from the position (see `h2o-mean`).

    Attributes:
        guard: share of the places that go to the highest deviations.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention", "squares")

    guard: float = parameter(0.3, least=0, most=1)

    def score(self, rows: HeadRows) -> FloatArray:
        mean = rows.attention / rows.ages
        # Rounding can make the variance of equal numbers negative.
        deviation = np.sqrt(np.maximum(0, rows.squares / rows.ages - mean**2))
        scores: FloatArray = mean.copy()
        scores[rows.best(deviation, math.floor(self.guard * rows.n_places))] = SAFE_SCORE
        return scores
