"""The random weights of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize


@dataclass(frozen=True)
class Tensor:
    """What llama.cpp reads of a tensor: its values or their blocks, row by row, and their type."""

    data: npt.NDArray[Any]
    dtype: GGMLQuantizationType


class RandomTensors:
    """Draws tensors and adds them to a file; the same calls give the same ones."""

    def __init__(self, writer: GGUFWriter, dtype: GGMLQuantizationType) -> None:
        """Matrices are of that type, where no other is asked for."""
        self._writer = writer
        self._dtype = dtype
        self._rng = np.random.default_rng(0)

    def matrix(self, *sizes: int, dtype: GGMLQuantizationType | None = None) -> Tensor:
        """Weights [..., n_out, n_in] that keep the variance of their inputs."""
        dtype = self._dtype if dtype is None else dtype
        return Tensor(quantize(self.normal(*sizes) / np.float32(sizes[-1] ** 0.5), dtype), dtype)

    def normal(self, *sizes: int) -> npt.NDArray[np.float32]:
        """Numbers of mean 0 and variance 1."""
        return self._rng.standard_normal(sizes, np.float32)

    def add(self, tensors: Mapping[str, Tensor], layer: int | None = None) -> None:
        """Add tensors under their names, which a layer stands before."""
        for name, tensor in tensors.items():
            full_name = name if layer is None else f"blk.{layer}.{name}"
            self._writer.add_tensor(full_name, tensor.data, raw_dtype=tensor.dtype)


def vector(values: npt.NDArray[np.floating[Any]]) -> Tensor:
    """Values as they are, in F32."""
    return Tensor(values.astype(np.float32), GGMLQuantizationType.F32)


def ones(*sizes: int) -> Tensor:
    """The weights of a norm."""
    return vector(np.ones(sizes))


def zeros(*sizes: int) -> Tensor:
    """Biases, which take their time and change nothing."""
    return vector(np.zeros(sizes))
