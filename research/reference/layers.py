"""The layers of a Llama model, except attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .weights import LayerWeights, LlamaWeights

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


def rms_norm(x: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
    """Divide each row of x [n_tokens, n_embd] by its root mean square; scale by weight [n_embd]."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: FloatArray = x / np.sqrt(mean_square + x.dtype.type(epsilon)) * weight
    return normed


def rope_frequencies(
    head_size: int, *, base: float, scale: float, factors: FloatArray
) -> npt.NDArray[np.float64]:
    """Return [head_size / 2] radians by which :func:`rotate` rotates each pair per position."""
    frequencies = scale * base ** (-np.arange(0, head_size, 2) / head_size) / factors
    return frequencies.astype(np.float64)


def rope_angles(
    positions: FloatArray, head_size: int, *, base: float, scale: float, factors: FloatArray
) -> FloatArray:
    """Return [n_tokens, head_size / 2] radians by which :func:`rotate` rotates each pair.

    They have the type of positions [n_tokens]. Each pair's angle is computed from the previous
    one's, as in ggml's rope (ggml-cpu/ops.cpp): at position 600 float32 is 1e-5 radians off the
    exact angle, which can change a logit by 1e-4.
    """
    step = positions.dtype.type(base) ** positions.dtype.type(-2 / head_size)
    steps = np.full((len(positions), head_size // 2), step, dtype=positions.dtype)
    steps[:, 0] = positions
    angles: FloatArray = positions.dtype.type(scale) * (np.cumprod(steps, axis=-1) / factors)
    return angles


def rotate(
    x: FloatArray, positions: IntArray, *, base: float, scale: float, factors: FloatArray
) -> FloatArray:
    """Rotary position embedding (RoPE) of neighbouring pairs.

    Pair i = (2i, 2i + 1) is rotated by position * scale * base**(-2i / head_size) / factors[i]. So
    the product of a rotated query and a rotated key depends only on the distance of their
    positions, and a cached rotated key stays valid when rows before it are dropped.

    Args:
        x: [n_heads, n_tokens, head_size].
        positions: [n_tokens].
        base, scale: of the frequencies and of the positions.
        factors: [head_size / 2].
    """
    angles = rope_angles(
        positions.astype(x.dtype), x.shape[-1], base=base, scale=scale, factors=factors
    )
    cos, sin = np.cos(angles), np.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


class Rope:
    """The rotary embedding of a model."""

    def __init__(self, weights: LlamaWeights) -> None:
        self._size = weights.hyperparameters.head_size
        self._base = weights.hyperparameters.rope_base
        self._scale = weights.hyperparameters.rope_scale
        self._factors = weights.rope_factors
        self._gain = weights.hyperparameters.rope_gain

    def frequencies(self) -> npt.NDArray[np.float64]:
        """See :func:`rope_frequencies`."""
        return rope_frequencies(
            self._size, base=self._base, scale=self._scale, factors=self._factors
        )

    def place(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """Return queries or keys x as attention uses them at positions; shapes as in `rotate`."""
        placed: FloatArray = self.rotate(x, positions) * x.dtype.type(self._gain)
        return placed

    def rotate(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """Rotate x [n_heads, n_tokens, head_size] by positions [n_tokens] (see :func:`rotate`)."""
        return rotate(x, positions, base=self._base, scale=self._scale, factors=self._factors)


def swiglu(x: FloatArray, layer: LayerWeights) -> FloatArray:
    """Feed-forward block: x [n_tokens, n_embd] to [n_tokens, n_embd], gated by SiLU."""
    gate = x @ layer.gate.T
    # Below about -88 exp overflows to infinity in float32; then gate / infinity is correctly 0.
    with np.errstate(over="ignore"):
        activated = gate / (1 + np.exp(-gate))
    outputs: FloatArray = (activated * (x @ layer.up.T)) @ layer.down.T
    return outputs


def split_heads(x: FloatArray, n_heads: int) -> FloatArray:
    """Reshape [n_tokens, n_heads * head_size] to [n_heads, n_tokens, head_size]."""
    split: FloatArray = x.reshape(x.shape[0], n_heads, -1).swapaxes(0, 1)
    return split
