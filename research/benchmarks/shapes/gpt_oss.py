"""gpt-oss: experts, attention of which a part goes to sinks, a window in every second layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from .random_tensors import RandomTensors, Tensor, ones, vector, zeros
from .shape import Shape

# Of the experts, whatever the other matrices have: the real models were published in it.
EXPERT_TYPE = GGMLQuantizationType.MXFP4


@dataclass(frozen=True, kw_only=True)
class GptOss(Shape):
    """The first layer has a window, the second sees everything, and so on.

    Attributes:
        n_window: tokens that layers with a window see.
        n_expert: of a layer.
        n_expert_used: of them for a token.
        n_ctx_original: tokens that it was trained on before YaRN.
        yarn_factor: how much longer the context became by it.
    """

    architecture: ClassVar[str] = "gpt-oss"

    n_window: int
    n_expert: int
    n_expert_used: int
    n_ctx_original: int
    yarn_factor: float

    def add_fields(self, writer: GGUFWriter) -> None:
        """Windows, experts and YaRN."""
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_sliding_window(self.n_window)
        writer.add_expert_count(self.n_expert)
        writer.add_expert_used_count(self.n_expert_used)
        writer.add_expert_feed_forward_length(self.n_ff)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(150000.0)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(self.yarn_factor)
        writer.add_rope_scaling_orig_ctx_len(self.n_ctx_original)

    def add_tensors(self, tensors: RandomTensors) -> None:
        """Of layers that differ in their windows only, which are no tensors."""
        tensors.add(
            {
                "token_embd.weight": tensors.matrix(self.n_vocab, self.n_embd),
                "output.weight": tensors.matrix(self.n_vocab, self.n_embd),
                "output_norm.weight": ones(self.n_embd),
            }
        )
        layer = self._attention(tensors) | self._experts(tensors)
        for i in range(self.n_layer):
            tensors.add(layer, i)

    def _attention(self, tensors: RandomTensors) -> dict[str, Tensor]:
        return {
            "attn_norm.weight": ones(self.n_embd),
            "attn_q.weight": tensors.matrix(self.n_embd_q, self.n_embd),
            "attn_q.bias": zeros(self.n_embd_q),
            "attn_k.weight": tensors.matrix(self.n_embd_kv, self.n_embd),
            "attn_k.bias": zeros(self.n_embd_kv),
            "attn_v.weight": tensors.matrix(self.n_embd_kv, self.n_embd),
            "attn_v.bias": zeros(self.n_embd_kv),
            # About as much as the keys of a window have together.
            "attn_sinks.weight": vector(5 + tensors.normal(self.n_head)),
            "attn_output.weight": tensors.matrix(self.n_embd, self.n_embd_q),
            "attn_output.bias": zeros(self.n_embd),
        }

    def _experts(self, tensors: RandomTensors) -> dict[str, Tensor]:
        """The matrices of all experts in one tensor each, and what chooses among experts."""
        inwards = (self.n_expert, self.n_ff, self.n_embd)
        outwards = (self.n_expert, self.n_embd, self.n_ff)
        chooser = tensors.matrix(self.n_expert, self.n_embd, dtype=GGMLQuantizationType.F32)
        return {
            "post_attention_norm.weight": ones(self.n_embd),
            "ffn_gate_inp.weight": chooser,
            "ffn_gate_inp.bias": zeros(self.n_expert),
            "ffn_gate_exps.weight": tensors.matrix(*inwards, dtype=EXPERT_TYPE),
            "ffn_gate_exps.bias": zeros(self.n_expert, self.n_ff),
            "ffn_up_exps.weight": tensors.matrix(*inwards, dtype=EXPERT_TYPE),
            "ffn_up_exps.bias": zeros(self.n_expert, self.n_ff),
            "ffn_down_exps.weight": tensors.matrix(*outwards, dtype=EXPERT_TYPE),
            "ffn_down_exps.bias": zeros(self.n_expert, self.n_embd),
        }
