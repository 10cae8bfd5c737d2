"""Shared by the architectures of tiny random models: sizes, a writer and random tensors.

The weights are scaled as `tiny_gguf` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize

ATTENTION_GAIN = 2.0
OUTPUT_GAIN = 2.0

# Adds a part of a layer, given the model and the layer's name.
Part = Callable[["TinyModel", str], None]


def store(writer: GGUFWriter, **fields: Any) -> None:
    """Store header fields by the names of the writer's functions."""
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)


@dataclass
class TinyModel:
    """A writer, the sizes of the model, and its random tensors."""

    writer: GGUFWriter
    rng: np.random.Generator
    dtype: GGMLQuantizationType
    n_layer: int
    n_head: int
    # As in the file: one number, or one per layer.
    n_head_kv: int | list[int]
    head_size: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    tied_output: bool

    def __post_init__(self) -> None:
        assert isinstance(self.n_head_kv, int)
        self.n_embd = self.n_head * self.head_size
        self.n_embd_kv = self.n_head_kv * self.head_size

    def store(self, **fields: Any) -> None:
        store(self.writer, **fields)

    def sizes(
        self,
        *,
        eps: float = 1e-5,
        base: float = 10000.0,
        n_rot: int | None = None,
        layer_norm: bool = False,
        lengths: bool = False,
    ) -> None:
        """Store the epsilon of norms, the rotation of heads, and the sizes of keys and values."""
        if layer_norm:
            self.store(layer_norm_eps=eps)
        else:
            self.store(layer_norm_rms_eps=eps)
        self.store(rope_freq_base=base)
        self.store(rope_dimension_count=self.head_size if n_rot is None else n_rot)
        if lengths:
            self.key_and_value(self.head_size)

    def key_and_value(self, n_key: int, n_value: int = 0) -> None:
        """Store the sizes of keys and values."""
        self.store(key_length=n_key, value_length=n_value or n_key)

    def state(
        self, *, n_tap: int, n_inner: int, n_state: int, n_step: int, n_group: int = 0
    ) -> None:
        """Store the sizes of a recurrent layer."""
        self.store(ssm_conv_kernel=n_tap, ssm_inner_size=n_inner, ssm_state_size=n_state)
        self.store(ssm_time_step_rank=n_step)
        if n_group:
            self.store(ssm_group_count=n_group)

    def yarn(self) -> None:
        """Store YaRN to four times the length."""
        self.store(rope_scaling_type=RopeScalingType.YARN, rope_scaling_factor=4.0)
        self.store(rope_scaling_orig_ctx_len=self.n_ctx_train // 4)

    def longrope(self) -> None:
        """Add factors for long contexts, and others for contexts up to n_ctx_train // 4."""
        n_trained = self.n_ctx_train // 4
        self.store(rope_scaling_orig_ctx_len=n_trained)
        self.store(rope_scaling_attn_factors=np.sqrt(1 + np.log(4) / np.log(n_trained)))
        self.vector("rope_factors_long.weight", np.geomspace(1, 8, self.head_size // 2))
        self.vector("rope_factors_short.weight", np.geomspace(1, 1.5, self.head_size // 2))

    def experts(self, n: int, n_used: int, n_ff: int) -> None:
        """Store the number of experts, how many a token uses, and their size."""
        self.store(expert_count=n, expert_used_count=n_used, expert_feed_forward_length=n_ff)

    def random_matrix(
        self, name: str, n_out: int, n_in: int, *, gain: float = 1.0, bias: bool = False
    ) -> None:
        """Add [n_out, n_in] weights that turn inputs of variance 1 into outputs of gain**2."""
        self.matrix(name, self.normal(n_out, n_in) * np.float32(gain / np.sqrt(n_in)))
        if bias:
            self.vector(f"{name}.bias", self.normal(n_out) / 10)

    def matrix(self, name: str, weights: npt.NDArray[np.float32]) -> None:
        """Add weights [n_out, n_in] in the type of the matrices."""
        data = quantize(weights, self.dtype)
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=self.dtype)

    def norm(self, name: str, size: int, *, gain: float = 1.0, bias: bool = False) -> None:
        """Add the weights of a norm, near the gain, so that a missing norm shows; and its bias."""
        self.vector(f"{name}.weight", gain * (1 + self.normal(size) / 10))
        if bias:
            self.vector(f"{name}.bias", self.normal(size) / 10)

    def vector(self, name: str, values: npt.NDArray[np.floating[Any]]) -> None:
        """Add unchanged values in F32."""
        self.writer.add_tensor(name, values.astype(np.float32))

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def query_key_value(self, layer: str) -> None:
        self.random_matrix(f"{layer}.attn_q", self.n_embd, self.n_embd, gain=ATTENTION_GAIN)
        self.random_matrix(f"{layer}.attn_k", self.n_embd_kv, self.n_embd, gain=ATTENTION_GAIN)
        self.random_matrix(f"{layer}.attn_v", self.n_embd_kv, self.n_embd)
        self.random_matrix(f"{layer}.attn_output", self.n_embd, self.n_embd, gain=OUTPUT_GAIN)

    def fused_query_key_value(
        self,
        layer: str,
        *,
        gain: float = ATTENTION_GAIN,
        out_gain: float = OUTPUT_GAIN,
        bias: bool = False,
    ) -> None:
        n, n_qkv = self.n_embd, self.n_embd + 2 * self.n_embd_kv
        self.random_matrix(f"{layer}.attn_qkv", n_qkv, n, gain=gain, bias=bias)
        self.random_matrix(f"{layer}.attn_output", n, n, gain=out_gain, bias=bias)

    def attention_biases(self, layer: str, gain: float = 1.0) -> None:
        for name, size in (("q", self.n_embd), ("k", self.n_embd_kv), ("v", self.n_embd_kv)):
            self.vector(f"{layer}.attn_{name}.bias", gain * self.normal(size))

    def head_norms(self, layer: str, *, gain: float = ATTENTION_GAIN) -> None:
        """Add the norms of a head's query and key, which set their standard deviation."""
        self.norm(f"{layer}.attn_q_norm", self.head_size, gain=gain)
        self.norm(f"{layer}.attn_k_norm", self.head_size, gain=gain)

    def gated_feed_forward(self, layer: str) -> None:
        self.random_matrix(f"{layer}.ffn_gate", self.n_ff, self.n_embd)
        self.feed_forward(layer)

    def feed_forward(
        self, layer: str, *, n_up: int = 0, out_gain: float = OUTPUT_GAIN, bias: bool = False
    ) -> None:
        self.random_matrix(f"{layer}.ffn_up", n_up or self.n_ff, self.n_embd, bias=bias)
        self.random_matrix(f"{layer}.ffn_down", self.n_embd, self.n_ff, gain=out_gain, bias=bias)

    def expert_matrices(self, layer: str, n: int, n_ff: int, *, fused: bool = False) -> None:
        """Add the matrices of n experts, each [n, n_out, n_in]; fused has gate and up in one."""
        inwards = {"gate_up": 2 * n_ff} if fused else {"gate": n_ff, "up": n_ff}
        for name, n_out in {**inwards, "down": self.n_embd}.items():
            n_in = n_ff if name == "down" else self.n_embd
            gain = OUTPUT_GAIN if name == "down" else 1.0
            weights = self.normal(n, n_out, n_in) * np.float32(gain / np.sqrt(n_in))
            self.matrix(f"{layer}.ffn_{name}_exps", weights)

    def shared_expert(self, layer: str, n_ff: int) -> None:
        """Add the expert that every token uses."""
        self.random_matrix(f"{layer}.ffn_gate_shexp", n_ff, self.n_embd)
        self.random_matrix(f"{layer}.ffn_up_shexp", n_ff, self.n_embd)
        self.random_matrix(f"{layer}.ffn_down_shexp", self.n_embd, n_ff, gain=OUTPUT_GAIN)

    def blocks(
        self,
        attend: Part | Sequence[Part],
        feed: Part | None = None,
        *,
        second: str = "ffn_norm",
        bias: bool = False,
    ) -> None:
        """Add layers of two parts, each after a norm; the first may differ between layers."""
        parts = attend if isinstance(attend, Sequence) else [attend] * self.n_layer
        for layer, part in zip(self.layers(), parts, strict=True):
            self.norm(f"{layer}.attn_norm", self.n_embd, bias=bias)
            part(self, layer)
            self.norm(f"{layer}.{second}", self.n_embd, bias=bias)
            (feed or TinyModel.gated_feed_forward)(self, layer)

    def embedding(self) -> None:
        """Add the token embedding: an individual part and a part common to all.

        Elements have a variance of 2, as much as two layers add to them; less if the embedding is
        also the output matrix.
        """
        rows = self.normal(self.n_vocab, self.n_embd) + self.normal(self.n_embd)
        if self.tied_output:
            rows /= np.float32(np.sqrt(self.n_embd))
        self.matrix("token_embd", rows)

    def output(self, *, bias: bool = False, norm: str = "output_norm", own: bool = False) -> None:
        """Add the last norm, and the output matrix unless that is the embedding and not its own."""
        self.norm(norm, self.n_embd, bias=bias)
        if own or not self.tied_output:
            self.random_matrix("output", self.n_vocab, self.n_embd)

    def layers(self) -> list[str]:
        return [f"blk.{i}" for i in range(self.n_layer)]
