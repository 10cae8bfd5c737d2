"""Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import GGUFWriter

from .random_tensors import RandomTensors, ones
from .shape import Shape


@dataclass(frozen=True, kw_only=True)
class Llama(Shape):
    """Layers that are all alike; the output has a matrix of its own."""

    architecture: ClassVar[str] = "llama"

    n_ctx_train: int = 32768

    def add_fields(self, writer: GGUFWriter) -> None:
        """Rotation of whole heads."""
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(10000.0)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)

    def add_tensors(self, tensors: RandomTensors) -> None:
        """Of attention and a gated feed-forward block."""
        matrix = tensors.matrix
        tensors.add(
            {
                "token_embd.weight": matrix(self.n_vocab, self.n_embd),
                "output.weight": matrix(self.n_vocab, self.n_embd),
                "output_norm.weight": ones(self.n_embd),
            }
        )
        layer = {
            "attn_norm.weight": ones(self.n_embd),
            "ffn_norm.weight": ones(self.n_embd),
            "attn_q.weight": matrix(self.n_embd_q, self.n_embd),
            "attn_k.weight": matrix(self.n_embd_kv, self.n_embd),
            "attn_v.weight": matrix(self.n_embd_kv, self.n_embd),
            "attn_output.weight": matrix(self.n_embd, self.n_embd_q),
            "ffn_gate.weight": matrix(self.n_ff, self.n_embd),
            "ffn_up.weight": matrix(self.n_ff, self.n_embd),
            "ffn_down.weight": matrix(self.n_embd, self.n_ff),
        }
        for i in range(self.n_layer):
            tensors.add(layer, i)
