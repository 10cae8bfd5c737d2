"""Sizes of a model, and what an architecture makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from gguf import GGUFWriter

from .random_tensors import RandomTensors


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """A model without its weights.

    Attributes:
        architecture: llama.cpp's name of it.
        n_layer: layers of all kinds.
        n_embd: elements of the residual stream.
        n_head, n_head_kv, head_size: of the layers that attend.
        n_ff: elements inside a feed-forward block, or inside one expert.
        n_vocab: tokens.
        n_ctx_train: tokens that it claims to be trained on.
    """

    architecture: ClassVar[str]

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int

    @property
    def n_embd_q(self) -> int:
        """Elements of the queries of all heads."""
        return self.n_head * self.head_size

    @property
    def n_embd_kv(self) -> int:
        """Elements of the keys of all heads, and of the values."""
        return self.n_head_kv * self.head_size

    @abstractmethod
    def add_fields(self, writer: GGUFWriter) -> None:
        """Store what the architecture wants to know beside the sizes that all have."""

    @abstractmethod
    def add_tensors(self, tensors: RandomTensors) -> None:
        """Draw the weights; the layers share one set of matrices."""
