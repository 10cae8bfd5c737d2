"""Other shapes of a budget than the same for all: what a layer or a head could gain from more rows.

Only the reference has them. In llama.cpp all heads of all layers share one set of cells, so that a
head which keeps fewer rows frees no memory: shapes are measured here, and not offered.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from .eviction import quotas

IntArray = npt.NDArray[np.int64]

# The same for every (layer, KV head); more for lower layers; or one pot for the heads of a layer.
Shape = Literal["uniform", "pyramid", "adaptive"]

# The last layer gets 1 / PYRAMID_BETA of the mean.
PYRAMID_BETA = 20
# Share of a uniform budget that a head keeps in any case.
ADAPTIVE_SHARE = 0.2


def pyramid_places(heavy: int, n_layer: int) -> IntArray:
    """[n_layer] heavy places that fall linearly from the first layer to the last.

    Source: Cai et al., "PyramidKV: dynamic KV cache compression based on pyramidal information
    funneling", 2024 (https://arxiv.org/abs/2406.02069), as in NVIDIA/kvpress,
    `kvpress/presses/pyramidkv_press.py`: the last layer gets heavy / beta with beta = 20, the first
    2 * heavy - heavy / beta. Places are whole numbers here by largest remainders, so that their sum
    is exactly that of `heavy` places for each layer.
    """
    if n_layer == 1:
        return np.array([heavy])
    first, last = 2 * PYRAMID_BETA - 1, 1
    slopes = [first * (n_layer - 1) - (first - last) * layer for layer in range(n_layer)]
    return quotas(slopes, heavy * n_layer)
