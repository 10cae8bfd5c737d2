"""Tiny random models with recurrent layers and attention; and text models with M-RoPE.

A recurrent layer keeps a state of fixed size: the last inputs of a short convolution and, except in
LFM 2, a sum over all tokens that decays. Steps vary over heads or channels, so that some remember a
few tokens and some hundreds. The weights are scaled as in `tiny_gguf`: a recurrent layer adds about
as much to the residual stream as attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
from gguf import Keys

from tiny_model import OUTPUT_GAIN, Part, TinyModel

N_STATE, N_KERNEL = 16, 4
N_EXPERT, N_EXPERT_USED = 4, 2


def before_softplus(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values that softplus maps to these."""
    return np.log(np.expm1(steps))


def convolution(model: TinyModel, layer: str, n_channels: int, *, bias: bool = False) -> None:
    """Add the taps of each channel's convolution over its last inputs."""
    model.vector(f"{layer}.ssm_conv1d.weight", model.normal(n_channels, N_KERNEL) / 2)
    if bias:
        model.vector(f"{layer}.ssm_conv1d.bias", model.normal(n_channels) / 10)


def _interleaved(n_pair: int) -> list[int]:
    """Return interleaved sections of M-RoPE: every pair needs a section to be rotated."""
    return [(n_pair + 2) // 3, (n_pair + 1) // 3, n_pair // 3, 0]


def _experts(model: TinyModel, layer: str) -> None:
    """Add a few routed experts, and a shared one."""
    n_ff, n_embd = model.n_ff // 3, model.n_embd
    model.random_matrix(f"{layer}.ffn_gate_inp", N_EXPERT, n_embd, gain=2.0)
    model.vector(f"{layer}.ffn_gate_inp_shexp.weight", model.normal(n_embd) / np.sqrt(n_embd))
    model.expert_matrices(layer, N_EXPERT, n_ff)
    model.shared_expert(layer, n_ff)


# Key and value heads of a gated delta net.
N_DELTA_KEY, N_DELTA_VALUE = 2, 4


def _add_delta_net(model: TinyModel) -> list[bool]:
    """Store the sizes of gated delta nets, and return which layers use them.

    Every fourth layer attends, as in the real models; with three layers, the last one.
    """
    interval = min(4, model.n_layer)
    model.sizes(eps=1e-6, n_rot=model.head_size // 2, lengths=True)
    model.store(full_attention_interval=interval)
    n_inner = N_DELTA_VALUE * N_STATE
    sizes = {"n_state": N_STATE, "n_step": N_DELTA_VALUE, "n_group": N_DELTA_KEY}
    model.state(n_tap=N_KERNEL, n_inner=n_inner, **sizes)
    return [(i + 1) % interval != 0 for i in range(model.n_layer)]


def _delta_net(model: TinyModel, layer: str) -> None:
    """Add the part of a gated delta net that both Qwens share."""
    n_value = N_DELTA_VALUE * N_STATE
    n_qkv = 2 * N_DELTA_KEY * N_STATE + n_value
    model.random_matrix(f"{layer}.attn_qkv", n_qkv, model.n_embd)
    model.random_matrix(f"{layer}.attn_gate", n_value, model.n_embd)
    convolution(model, layer, n_qkv)
    model.vector(f"{layer}.ssm_dt.bias", model.normal(N_DELTA_VALUE) / 10)
    model.vector(f"{layer}.ssm_a", -np.geomspace(0.002, 0.2, N_DELTA_VALUE))
    model.norm(f"{layer}.ssm_norm", N_STATE)
    # the gate halves the norm's output of 1
    model.random_matrix(f"{layer}.ssm_out", model.n_embd, n_value, gain=2 * OUTPUT_GAIN)


def _gated_attention(model: TinyModel, layer: str) -> None:
    """Add attention with a gate per query, which is applied to its output."""
    model.random_matrix(f"{layer}.attn_q", 2 * model.n_embd, model.n_embd)
    model.random_matrix(f"{layer}.attn_k", model.n_embd_kv, model.n_embd)
    model.random_matrix(f"{layer}.attn_v", model.n_embd_kv, model.n_embd)
    model.head_norms(layer)
    # the gate halves the output, and the one attending layer in four must matter
    model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd, gain=4 * OUTPUT_GAIN)


def _delta_net_35(model: TinyModel, layer: str) -> None:
    _delta_net(model, layer)
    model.random_matrix(f"{layer}.ssm_beta", N_DELTA_VALUE, model.n_embd)
    model.random_matrix(f"{layer}.ssm_alpha", N_DELTA_VALUE, model.n_embd)


def _delta_net_next(model: TinyModel, layer: str) -> None:
    _delta_net(model, layer)
    model.random_matrix(f"{layer}.ssm_ba", 2 * N_DELTA_VALUE, model.n_embd)


def _add_qwen(model: TinyModel, delta_net: Part, *, experts: bool) -> None:
    """Three gated delta nets, then gated attention."""
    recurrent = _add_delta_net(model)
    if experts:
        model.experts(N_EXPERT, N_EXPERT_USED, model.n_ff // 3)
        model.store(expert_shared_feed_forward_length=model.n_ff // 3)
    model.output()
    parts = [delta_net if is_recurrent else _gated_attention for is_recurrent in recurrent]
    model.blocks(parts, _experts if experts else None, second="post_attention_norm")


def _add_qwen35(model: TinyModel, *, experts: bool = False) -> None:
    """M-RoPE rotates half of the elements."""
    model.store(rope_dimension_sections=_interleaved(model.head_size // 4))
    _add_qwen(model, _delta_net_35, experts=experts)


def _add_qwen3next(model: TinyModel) -> None:
    """Rotate pairs (i, i + quarter)."""
    _add_qwen(model, _delta_net_next, experts=True)


def _every_second_attends(model: TinyModel) -> list[bool]:
    """Store that even layers have no KV heads; return which these are."""
    n_head_kv = model.n_embd_kv // model.head_size
    recurrent = [i % 2 == 0 for i in range(model.n_layer)]
    model.n_head_kv = [0 if is_recurrent else n_head_kv for is_recurrent in recurrent]
    return recurrent


def _short_convolution(model: TinyModel, layer: str, n_tap: int) -> None:
    """Add a convolution of a few tokens between two gates."""
    n = model.n_embd
    model.random_matrix(f"{layer}.shortconv.in_proj", 3 * n, n)
    taps = model.normal(n, n_tap) / np.sqrt(n_tap)
    model.vector(f"{layer}.shortconv.conv.weight", taps)
    model.random_matrix(f"{layer}.shortconv.out_proj", n, n, gain=OUTPUT_GAIN)


def _normed_attention(model: TinyModel, layer: str) -> None:
    model.query_key_value(layer)
    model.head_norms(layer)


def _add_lfm2(model: TinyModel) -> None:
    """Every second layer is only a convolution of three tokens between two gates."""
    n_tap = 3
    model.sizes()
    model.store(shortconv_l_cache=n_tap)
    recurrent = _every_second_attends(model)
    # this is the last norm: llama.cpp keeps the name of older files
    model.output(norm="token_embd_norm")
    convolution = partial(_short_convolution, n_tap=n_tap)
    model.blocks([convolution if each else _normed_attention for each in recurrent])


def _add_mamba2(model: TinyModel, n_inner: int, n_head: int, n_group: int) -> Part:
    """Store the sizes of Mamba 2, and return the function that adds its tensors."""
    model.state(n_tap=N_KERNEL, n_inner=n_inner, n_state=N_STATE, n_step=n_head, n_group=n_group)
    return partial(_mamba2, n_inner=n_inner, n_head=n_head, n_group=n_group)


def _mamba2(
    model: TinyModel, layer: str, *, n_inner: int, n_head: int, n_group: int, norm: bool = True
) -> None:
    """Add the tensors of Mamba 2: its inputs are one matrix, and each head has one step."""
    n_mixed = 2 * n_group * N_STATE
    parts = ((2 * n_inner, 1.0), (n_mixed, 2.0), (n_head, 0.5))  # gate, input; keys, queries; steps
    rows = [model.normal(n_out, model.n_embd) * np.float32(gain) for n_out, gain in parts]
    model.matrix(f"{layer}.ssm_in", np.concatenate(rows) / np.float32(np.sqrt(model.n_embd)))
    convolution(model, layer, n_inner + n_mixed, bias=True)
    model.vector(f"{layer}.ssm_dt.bias", before_softplus(np.geomspace(0.002, 0.5, n_head)))
    model.vector(f"{layer}.ssm_a", -np.exp(model.normal(n_head, 1) / 4))
    model.vector(f"{layer}.ssm_d", model.normal(n_head, 1))
    if norm:
        weights = 1 + model.normal(n_group, n_inner // n_group) / 10
        model.vector(f"{layer}.ssm_norm.weight", weights)
    # without the norm the gate halves the output
    gain = OUTPUT_GAIN if norm else 2 * OUTPUT_GAIN
    model.random_matrix(f"{layer}.ssm_out", model.n_embd, n_inner, gain=gain)


def _add_granite_hybrid(model: TinyModel) -> None:
    """Every second layer is Mamba 2, the others do not rotate; every possible scale is set."""
    model.sizes()
    model.store(rope_scaling_finetuned=False, embedding_scale=1.5, residual_scale=0.75)
    model.store(attention_scale=0.15, logit_scale=1.25)
    mamba2 = _add_mamba2(model, 2 * model.n_embd, 8, 1)
    recurrent = _every_second_attends(model)
    model.output()
    model.blocks([mamba2 if each else TinyModel.query_key_value for each in recurrent])


def _add_nemotron_h(model: TinyModel) -> None:
    """Layers alternate between Mamba 2, attention without rotation, and a feed-forward block."""
    n_head_kv = model.n_embd_kv // model.head_size
    kinds = [i % 3 for i in range(model.n_layer)]  # 0: recurrent, 1: attention, 2: feed-forward
    model.n_head_kv = [n_head_kv if kind == 1 else 0 for kind in kinds]
    del model.writer.kv_data[0][Keys.LLM.FEED_FORWARD_LENGTH.format(arch=model.writer.arch)]
    model.store(feed_forward_length=[model.n_ff if kind == 2 else 0 for kind in kinds])
    model.store(layer_norm_eps=1e-5, layer_norm_rms_eps=1e-5)
    model.key_and_value(model.head_size)
    parts = (_add_mamba2(model, model.n_embd, 4, 2), TinyModel.query_key_value)
    model.output()
    for layer, kind in zip(model.layers(), kinds, strict=True):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        (*parts, TinyModel.feed_forward)[kind](model, layer)


def _add_falcon_h1(model: TinyModel) -> None:
    """Every layer has parallel attention and Mamba 2: a KV cache and a state."""
    model.sizes(lengths=True)
    mamba2 = _add_mamba2(model, model.n_embd, 4, 1)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        mamba2(model, layer, norm=False)
        # llama.cpp expects this without ".weight"
        model.vector(f"{layer}.ffn_norm", 1 + model.normal(model.n_embd) / 10)
        model.gated_feed_forward(layer)


def mamba(model: TinyModel, layer: str, *, norms: bool = True) -> None:
    """Add Mamba, and store its sizes."""
    n_inner, n_step = 2 * model.n_embd, 32
    if layer == model.layers()[0]:
        model.state(n_tap=N_KERNEL, n_inner=n_inner, n_state=N_STATE, n_step=n_step)
    model.random_matrix(f"{layer}.ssm_in", 2 * n_inner, model.n_embd)
    convolution(model, layer, n_inner, bias=True)
    model.random_matrix(f"{layer}.ssm_x", n_step + 2 * N_STATE, n_inner)
    if norms:
        model.norm(f"{layer}.ssm_dt_norm", n_step)
        model.norm(f"{layer}.ssm_b_norm", N_STATE)
        model.norm(f"{layer}.ssm_c_norm", N_STATE)
    model.random_matrix(f"{layer}.ssm_dt", n_inner, n_step, gain=0.5)
    model.vector(f"{layer}.ssm_dt.bias", before_softplus(np.geomspace(0.002, 0.5, n_inner)))
    model.vector(f"{layer}.ssm_a", -np.exp(model.normal(n_inner, N_STATE) / 4))
    model.vector(f"{layer}.ssm_d", model.normal(n_inner))
    # the gate halves the output
    model.random_matrix(f"{layer}.ssm_out", model.n_embd, n_inner, gain=2 * OUTPUT_GAIN)


def _add_jamba(model: TinyModel) -> None:
    """Every second layer is Mamba with additional norms, the others do not rotate."""
    model.store(layer_norm_rms_eps=1e-6)
    recurrent = _every_second_attends(model)
    model.output()
    model.blocks([mamba if each else TinyModel.query_key_value for each in recurrent])


def _biased_attention(model: TinyModel, layer: str) -> None:
    model.query_key_value(layer)
    model.attention_biases(layer)


def _add_qwen2vl(model: TinyModel) -> None:
    """M-RoPE: the pairs of a head are in sections; their positions differ only for images."""
    later = 3 * model.head_size // 16
    model.sizes(eps=1e-6)
    model.store(rope_dimension_sections=[model.head_size // 2 - 2 * later, later, later, 0])
    model.output()
    model.blocks(_biased_attention)


def _add_qwen3vl(model: TinyModel) -> None:
    """M-RoPE with interleaved sections, after a norm of queries and keys.

    Images also add something after the first layer.
    """
    model.sizes(eps=1e-6, lengths=True)
    model.store(num_deepstack_layers=1, rope_dimension_sections=_interleaved(model.head_size // 2))
    model.output()
    model.blocks(_normed_attention)


# Name of the variant, which is llama.cpp's architecture name: that name, and the function that adds
# its fields and tensors. Three layers have at least one of each kind. The first three have their
# real
# pattern from four layers on: three recurrent ones, then attention. In "lfm2", "granitehybrid" and
# "jamba" odd layers attend; in "nemotron_h" layers 1, 4, 7 ...; in the last three, all of them.
HYBRIDS: dict[str, tuple[str, Callable[[TinyModel], None]]] = {
    "qwen35": ("qwen35", _add_qwen35),
    "qwen35moe": ("qwen35moe", partial(_add_qwen35, experts=True)),
    "qwen3next": ("qwen3next", _add_qwen3next),
    "lfm2": ("lfm2", _add_lfm2),
    "granitehybrid": ("granitehybrid", _add_granite_hybrid),
    "jamba": ("jamba", _add_jamba),
    "nemotron_h": ("nemotron_h", _add_nemotron_h),
    "falcon-h1": ("falcon-h1", _add_falcon_h1),
    "qwen2vl": ("qwen2vl", _add_qwen2vl),
    "qwen3vl": ("qwen3vl", _add_qwen3vl),
}
