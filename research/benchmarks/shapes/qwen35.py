"""Qwen 3.5: three gated delta nets, then attention, and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from gguf import GGUFWriter

from .random_tensors import RandomTensors, Tensor, ones, vector, zeros
from .shape import Shape


@dataclass(frozen=True, kw_only=True)
class Qwen35(Shape):
    """The dense models: without experts, images, and the layer that predicts further tokens.

    The output is the embedding, as in the small ones.

    Attributes:
        attends_every: of so many layers the last one attends; the others are delta nets.
        rope_sections: pairs of a head's elements that each of M-RoPE's four positions rotates; the
            other elements stay as they are.
        n_delta_head: key heads of a delta net, and value heads.
        delta_head_size: elements of a key and of a value there.
        n_kernel: tokens that the convolution before a delta net sees.
    """

    architecture: ClassVar[str] = "qwen35"

    attends_every: int
    rope_sections: tuple[int, int, int, int]
    n_delta_head: int
    delta_head_size: int
    n_kernel: int

    @property
    def n_embd_delta(self) -> int:
        """Elements of the queries of a delta net, of its keys and of its values."""
        return self.n_delta_head * self.delta_head_size

    def add_fields(self, writer: GGUFWriter) -> None:
        """Sizes of both kinds of layers, and M-RoPE."""
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_rope_dimension_count(2 * sum(self.rope_sections))
        writer.add_rope_dimension_sections(self.rope_sections)
        writer.add_rope_freq_base(1e7)
        writer.add_full_attention_interval(self.attends_every)
        writer.add_ssm_conv_kernel(self.n_kernel)
        writer.add_ssm_state_size(self.delta_head_size)
        writer.add_ssm_group_count(self.n_delta_head)
        writer.add_ssm_time_step_rank(self.n_delta_head)
        writer.add_ssm_inner_size(self.n_embd_delta)

    def add_tensors(self, tensors: RandomTensors) -> None:
        """Of both kinds of layers, and the feed-forward block that they share."""
        tensors.add(
            {
                "token_embd.weight": tensors.matrix(self.n_vocab, self.n_embd),
                "output_norm.weight": ones(self.n_embd),
            }
        )
        attention, delta_net = self._attention(tensors), self._delta_net(tensors)
        feed_forward = {
            "attn_norm.weight": ones(self.n_embd),
            "post_attention_norm.weight": ones(self.n_embd),
            "ffn_gate.weight": tensors.matrix(self.n_ff, self.n_embd),
            "ffn_up.weight": tensors.matrix(self.n_ff, self.n_embd),
            "ffn_down.weight": tensors.matrix(self.n_embd, self.n_ff),
        }
        for i in range(self.n_layer):
            attends = (i + 1) % self.attends_every == 0
            tensors.add((attention if attends else delta_net) | feed_forward, i)

    def _attention(self, tensors: RandomTensors) -> dict[str, Tensor]:
        """Each query comes with a gate for what it attends to."""
        return {
            "attn_q.weight": tensors.matrix(2 * self.n_embd_q, self.n_embd),
            "attn_k.weight": tensors.matrix(self.n_embd_kv, self.n_embd),
            "attn_v.weight": tensors.matrix(self.n_embd_kv, self.n_embd),
            "attn_q_norm.weight": ones(self.head_size),
            "attn_k_norm.weight": ones(self.head_size),
            "attn_output.weight": tensors.matrix(self.n_embd, self.n_embd_q),
        }

    def _delta_net(self, tensors: RandomTensors) -> dict[str, Tensor]:
        """Some heads forget within a few tokens and some remember hundreds."""
        n_mixed = 3 * self.n_embd_delta
        taps = tensors.normal(n_mixed, self.n_kernel) / self.n_kernel**0.5
        return {
            "attn_qkv.weight": tensors.matrix(n_mixed, self.n_embd),
            "attn_gate.weight": tensors.matrix(self.n_embd_delta, self.n_embd),
            "ssm_conv1d.weight": vector(taps),
            "ssm_dt.bias": zeros(self.n_delta_head),
            "ssm_a": vector(-np.geomspace(0.002, 0.2, self.n_delta_head)),
            "ssm_beta.weight": tensors.matrix(self.n_delta_head, self.n_embd),
            "ssm_alpha.weight": tensors.matrix(self.n_delta_head, self.n_embd),
            "ssm_norm.weight": ones(self.delta_head_size),
            "ssm_out.weight": tensors.matrix(self.n_embd, self.n_embd_delta),
        }
