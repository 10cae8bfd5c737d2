"""What the architectures of tiny random models write with: sizes, a writer and random tensors.

The weights are scaled as `tiny_gguf` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

ATTENTION_GAIN = 2.0
OUTPUT_GAIN = 2.0


class TinyModel:
    """A writer, the sizes of the model, and the random tensors that go into it."""

    def __init__(
        self,
        writer: GGUFWriter,
        rng: np.random.Generator,
        dtype: GGMLQuantizationType,
        *,
        n_layer: int,
        n_head: int,
        n_head_kv: int,
        head_size: int,
        n_ff: int,
        n_vocab: int,
        n_ctx_train: int,
        tied_output: bool,
    ) -> None:
        self.writer = writer
        self.rng = rng
        self.dtype = dtype
        self.n_layer = n_layer
        self.n_head = n_head
        # As the file has it: one number, or one for each layer.
        self.n_head_kv: int | list[int] = n_head_kv
        self.head_size = head_size
        self.n_ff = n_ff
        self.n_vocab = n_vocab
        self.n_ctx_train = n_ctx_train
        self.tied_output = tied_output
        self.n_embd = n_head * head_size
        self.n_embd_kv = n_head_kv * head_size

    def random_matrix(self, name: str, n_out: int, n_in: int, *, gain: float = 1.0) -> None:
        """Add [n_out, n_in] weights that turn inputs of variance 1 into outputs of gain**2."""
        self.matrix(name, self.normal(n_out, n_in) * np.float32(gain / np.sqrt(n_in)))

    def matrix(self, name: str, weights: npt.NDArray[np.float32]) -> None:
        """Add weights [n_out, n_in] in the type of the matrices."""
        data = quantize(weights, self.dtype)
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=self.dtype)

    def norm(self, name: str, size: int, *, gain: float = 1.0, bias: bool = False) -> None:
        """Add the weights of a norm, near the gain, so that a norm left out shows; and its bias."""
        self.vector(f"{name}.weight", gain * (1 + self.normal(size) / 10))
        if bias:
            self.vector(f"{name}.bias", self.normal(size) / 10)

    def vector(self, name: str, values: npt.NDArray[np.floating[Any]]) -> None:
        """Add values as they are, in F32."""
        self.writer.add_tensor(name, values.astype(np.float32))

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def query_key_value(self, layer: str) -> None:
        self.random_matrix(f"{layer}.attn_q", self.n_embd, self.n_embd, gain=ATTENTION_GAIN)
        self.random_matrix(f"{layer}.attn_k", self.n_embd_kv, self.n_embd, gain=ATTENTION_GAIN)
        self.random_matrix(f"{layer}.attn_v", self.n_embd_kv, self.n_embd)
        self.random_matrix(f"{layer}.attn_output", self.n_embd, self.n_embd, gain=OUTPUT_GAIN)

    def gated_feed_forward(self, layer: str) -> None:
        self.random_matrix(f"{layer}.ffn_gate", self.n_ff, self.n_embd)
        self.random_matrix(f"{layer}.ffn_up", self.n_ff, self.n_embd)
        self.random_matrix(f"{layer}.ffn_down", self.n_embd, self.n_ff, gain=OUTPUT_GAIN)

    def embedding(self) -> None:
        """Add the embedding of the tokens: a part of their own and a part common to all.

        Elements have a variance of 2, as much as two layers add to them; less where the embedding
        makes the logits too.
        """
        rows = self.normal(self.n_vocab, self.n_embd) + self.normal(self.n_embd)
        if self.tied_output:
            rows /= np.float32(np.sqrt(self.n_embd))
        self.matrix("token_embd", rows)

    def output(self, *, bias: bool = False) -> None:
        """Add the last norm, and the matrix of the logits unless that is the embedding."""
        self.norm("output_norm", self.n_embd, bias=bias)
        if not self.tied_output:
            self.random_matrix("output", self.n_vocab, self.n_embd)

    def layers(self) -> list[str]:
        return [f"blk.{i}" for i in range(self.n_layer)]
