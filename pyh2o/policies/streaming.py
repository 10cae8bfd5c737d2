"""Sinks and a window, as StreamingLLM keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import LARGEST_COUNT, SAFE_SCORE, FloatArray, HeadRows, Policy, parameter


@dataclass(frozen=True)
class Streaming(Policy):
    """Keeps the first positions of the text, the attention sinks, and the newest ones.

    The heavy places are a longer window then: the least that every other policy has to beat.

    Source: Xiao et al., "Efficient streaming language models with attention sinks", ICLR 2024
    (https://arxiv.org/abs/2309.17453).

    Needs nothing but positions.

    Deviations: the paper gives the rows dense positions at every step. Here they keep the text's
    own until the positions that the model was trained on are used up.

    Attributes:
        sinks: first positions that stay; 0 for the window only.
    """

    sinks: int = parameter(4, least=0, most=LARGEST_COUNT)

    def score(self, rows: HeadRows) -> FloatArray:
        return np.where(rows.positions < self.sinks, SAFE_SCORE, rows.positions.astype(np.float64))
