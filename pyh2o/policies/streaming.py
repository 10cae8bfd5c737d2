"""StreamingLLM: attention sinks and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import LARGEST_COUNT, SAFE_SCORE, FloatArray, HeadRows, Policy, parameter


@dataclass(frozen=True)
class Streaming(Policy):
    """Keeps the first positions of the text, the attention sinks, and the newest ones.

    The heavy rows extend the recent window. This is the baseline for all other policies.

    Source: Xiao et al., "Efficient streaming language models with attention sinks", ICLR 2024
    (https://arxiv.org/abs/2309.17453).

    Cost: none.

    Deviations: the paper renumbers positions densely at every step. Here rows keep the positions of
    the text until the trained context is used up.

    Attributes:
        sinks: number of first positions to keep; 0 for the window only.
    """

    sinks: int = parameter(4, least=0, most=LARGEST_COUNT)

    def score(self, rows: HeadRows) -> FloatArray:
        return np.where(rows.positions < self.sinks, SAFE_SCORE, rows.positions.astype(np.float64))
