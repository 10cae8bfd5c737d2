"""H2O: the sum of all attention, for each head and for heads that have to agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import FloatArray, HeadRows, Policy, Scope


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

    name: ClassVar[str] = "h2o"
    needs_attention: ClassVar[bool] = True

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.attention


@dataclass(frozen=True)
class H2OLayer(H2O):
    """Keeps what collected most attention in the mean of a layer's KV heads, which all keep that.

    Source: `h2o`; to measure what a choice of each head on its own is worth.

    Deviation: from the paper, whose heads choose on their own.
    """

    name: ClassVar[str] = "h2o-layer"
    scope: ClassVar[Scope] = "layer"


@dataclass(frozen=True)
class H2OCells(H2O):
    """Keeps what collected most attention in the mean of all layers and KV heads: one set for all.

    Source: `h2o`; to measure what freeing whole cells of llama.cpp, which all layers and heads
    share, could do.

    Deviation: from the paper, whose heads choose on their own.
    """

    name: ClassVar[str] = "h2o-cells"
    scope: ClassVar[Scope] = "cache"
