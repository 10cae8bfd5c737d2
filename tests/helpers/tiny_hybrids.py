"""Tiny random models with recurrent layers beside attention; and text models with M-RoPE.

A recurrent layer keeps a state of fixed size: the last inputs of a short convolution, and in all
but LFM 2 a sum over all tokens that fades with time. Steps are spread over heads or channels, so
that some forget within a few tokens and some remember hundreds. The weights are scaled as
`tiny_gguf` says: what a recurrent layer adds to the residual stream weighs about as much as what
attention adds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gguf import Keys

from tiny_model import ATTENTION_GAIN, OUTPUT_GAIN, TinyModel

N_STATE, N_KERNEL = 16, 4
N_EXPERT, N_EXPERT_USED = 4, 2


def normed_query_and_key(model: TinyModel, layer: str) -> None:
    """Add the norms of a head's query and key, which give the elements their deviation."""
    for name in ("attn_q_norm", "attn_k_norm"):
        weights = ATTENTION_GAIN * (1 + model.normal(model.head_size) / 10)
        model.vector(f"{layer}.{name}.weight", weights)


def before_softplus(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What softplus turns into these."""
    return np.log(np.expm1(steps))


def convolution(model: TinyModel, layer: str, n_channels: int) -> None:
    """Add the taps of each channel's convolution with its last inputs."""
    model.vector(f"{layer}.ssm_conv1d.weight", model.normal(n_channels, N_KERNEL) / 2)


def _interleaved(n_pair: int) -> list[int]:
    """Sections of M-RoPE whose pairs take turns: every pair is of one, or it would not rotate."""
    return [(n_pair + 2) // 3, (n_pair + 1) // 3, n_pair // 3, 0]


def _add_experts(model: TinyModel) -> None:
    """Store that feed-forward blocks are some of a few experts, and one that is always asked."""
    model.writer.add_expert_count(N_EXPERT)
    model.writer.add_expert_used_count(N_EXPERT_USED)
    model.writer.add_expert_feed_forward_length(model.n_ff // 3)
    model.writer.add_expert_shared_feed_forward_length(model.n_ff // 3)


def _experts(model: TinyModel, layer: str) -> None:
    n_ff, n_embd = model.n_ff // 3, model.n_embd
    model.random_matrix(f"{layer}.ffn_gate_inp", N_EXPERT, n_embd, gain=2.0)
    model.vector(f"{layer}.ffn_gate_inp_shexp.weight", model.normal(n_embd) / np.sqrt(n_embd))
    for name, n_out, n_in, gain in (
        ("gate", n_ff, n_embd, 1.0),
        ("up", n_ff, n_embd, 1.0),
        ("down", n_embd, n_ff, OUTPUT_GAIN),
    ):
        weights = model.normal(N_EXPERT, n_out, n_in) * gain / np.sqrt(n_in)
        model.vector(f"{layer}.ffn_{name}_exps.weight", weights)
        model.random_matrix(f"{layer}.ffn_{name}_shexp", n_out, n_in, gain=gain)


# Key and value heads of a gated delta net.
N_DELTA_KEY, N_DELTA_VALUE = 2, 4


def _add_delta_net(model: TinyModel) -> list[bool]:
    """Store the sizes of gated delta nets, and return which layers are such ones.

    Every fourth layer attends, as in the real models; the last one, where there are but three.
    """
    interval = min(4, model.n_layer)
    model.writer.add_layer_norm_rms_eps(1e-6)
    model.writer.add_key_length(model.head_size)
    model.writer.add_value_length(model.head_size)
    model.writer.add_rope_dimension_count(model.head_size // 2)
    model.writer.add_rope_freq_base(10000.0)
    model.writer.add_full_attention_interval(interval)
    model.writer.add_ssm_conv_kernel(N_KERNEL)
    model.writer.add_ssm_state_size(N_STATE)
    model.writer.add_ssm_group_count(N_DELTA_KEY)
    model.writer.add_ssm_time_step_rank(N_DELTA_VALUE)
    model.writer.add_ssm_inner_size(N_DELTA_VALUE * N_STATE)
    return [(i + 1) % interval != 0 for i in range(model.n_layer)]


def _delta_net(model: TinyModel, layer: str) -> None:
    """Add what both Qwens share of a gated delta net."""
    n_value = N_DELTA_VALUE * N_STATE
    n_qkv = 2 * N_DELTA_KEY * N_STATE + n_value
    model.random_matrix(f"{layer}.attn_qkv", n_qkv, model.n_embd)
    model.random_matrix(f"{layer}.attn_gate", n_value, model.n_embd)
    convolution(model, layer, n_qkv)
    model.vector(f"{layer}.ssm_dt.bias", model.normal(N_DELTA_VALUE) / 10)
    model.vector(f"{layer}.ssm_a", -np.geomspace(0.002, 0.2, N_DELTA_VALUE))
    model.norm(f"{layer}.ssm_norm", N_STATE)
    # the gate halves what the norm made 1
    model.random_matrix(f"{layer}.ssm_out", model.n_embd, n_value, gain=2 * OUTPUT_GAIN)


def _gated_attention(model: TinyModel, layer: str) -> None:
    """Add attention whose queries come with a gate each, which is then applied to its output."""
    model.random_matrix(f"{layer}.attn_q", 2 * model.n_embd, model.n_embd)
    model.random_matrix(f"{layer}.attn_k", model.n_embd_kv, model.n_embd)
    model.random_matrix(f"{layer}.attn_v", model.n_embd_kv, model.n_embd)
    normed_query_and_key(model, layer)
    # the gate halves the output, and one layer in four has to matter
    model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd, gain=4 * OUTPUT_GAIN)


def _add_qwen35(model: TinyModel, *, experts: bool = False) -> None:
    """Three gated delta nets, then gated attention, half of whose elements M-RoPE rotates."""
    recurrent = _add_delta_net(model)
    model.writer.add_rope_dimension_sections(_interleaved(model.head_size // 4))
    if experts:
        _add_experts(model)
    model.output()
    for layer, is_recurrent in zip(model.layers(), recurrent, strict=True):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        if is_recurrent:
            _delta_net(model, layer)
            model.random_matrix(f"{layer}.ssm_beta", N_DELTA_VALUE, model.n_embd)
            model.random_matrix(f"{layer}.ssm_alpha", N_DELTA_VALUE, model.n_embd)
        else:
            _gated_attention(model, layer)
        model.norm(f"{layer}.post_attention_norm", model.n_embd)
        (_experts if experts else TinyModel.gated_feed_forward)(model, layer)


def _add_qwen35moe(model: TinyModel) -> None:
    """The same with experts."""
    _add_qwen35(model, experts=True)


def _add_qwen3next(model: TinyModel) -> None:
    """Delta nets and gated attention too, with experts; rotates pairs (i, i + quarter)."""
    recurrent = _add_delta_net(model)
    _add_experts(model)
    model.output()
    for layer, is_recurrent in zip(model.layers(), recurrent, strict=True):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        if is_recurrent:
            _delta_net(model, layer)
            model.random_matrix(f"{layer}.ssm_ba", 2 * N_DELTA_VALUE, model.n_embd)
        else:
            _gated_attention(model, layer)
        model.norm(f"{layer}.post_attention_norm", model.n_embd)
        _experts(model, layer)


def _every_second_attends(model: TinyModel) -> list[bool]:
    """Store that the layers with an even number have no KV heads; return which these are."""
    n_head_kv = model.n_embd_kv // model.head_size
    recurrent = [i % 2 == 0 for i in range(model.n_layer)]
    model.n_head_kv = [0 if is_recurrent else n_head_kv for is_recurrent in recurrent]
    return recurrent


def _add_lfm2(model: TinyModel) -> None:
    """Every second layer is a convolution of three tokens between two gates, and no more."""
    n_tap = 3
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_rope_dimension_count(model.head_size)
    model.writer.add_rope_freq_base(10000.0)
    model.writer.add_shortconv_l_cache(n_tap)
    recurrent = _every_second_attends(model)
    # this is the last norm: llama.cpp keeps the name of older files
    model.norm("token_embd_norm", model.n_embd)
    if not model.tied_output:
        model.random_matrix("output", model.n_vocab, model.n_embd)
    for layer, is_recurrent in zip(model.layers(), recurrent, strict=True):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        if is_recurrent:
            model.random_matrix(f"{layer}.shortconv.in_proj", 3 * model.n_embd, model.n_embd)
            taps = model.normal(model.n_embd, n_tap) / np.sqrt(n_tap)
            model.vector(f"{layer}.shortconv.conv.weight", taps)
            model.random_matrix(
                f"{layer}.shortconv.out_proj", model.n_embd, model.n_embd, gain=OUTPUT_GAIN
            )
        else:
            model.query_key_value(layer)
            normed_query_and_key(model, layer)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.gated_feed_forward(layer)


def _add_mamba2(model: TinyModel, n_inner: int, n_head: int, n_group: int) -> None:
    """Store the sizes of Mamba 2."""
    model.writer.add_ssm_conv_kernel(N_KERNEL)
    model.writer.add_ssm_inner_size(n_inner)
    model.writer.add_ssm_state_size(N_STATE)
    model.writer.add_ssm_time_step_rank(n_head)
    model.writer.add_ssm_group_count(n_group)


def _mamba2(
    model: TinyModel, layer: str, n_inner: int, n_head: int, n_group: int, *, norm: bool = True
) -> None:
    """Add the tensors of Mamba 2: its inputs are one matrix, and each head has one step."""
    n_mixed = 2 * n_group * N_STATE
    parts = ((2 * n_inner, 1.0), (n_mixed, 2.0), (n_head, 0.5))  # gate, input; keys, queries; steps
    rows = [model.normal(n_out, model.n_embd) * np.float32(gain) for n_out, gain in parts]
    model.matrix(f"{layer}.ssm_in", np.concatenate(rows) / np.float32(np.sqrt(model.n_embd)))
    convolution(model, layer, n_inner + n_mixed)
    model.vector(f"{layer}.ssm_conv1d.bias", model.normal(n_inner + n_mixed) / 10)
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
    """Every second layer is Mamba 2, the others do not rotate; scales wherever there can be one."""
    sizes = (2 * model.n_embd, 8, 1)
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_rope_dimension_count(model.head_size)
    model.writer.add_rope_scaling_finetuned(False)
    model.writer.add_embedding_scale(1.5)
    model.writer.add_residual_scale(0.75)
    model.writer.add_attention_scale(0.15)
    model.writer.add_logit_scale(1.25)
    _add_mamba2(model, *sizes)
    recurrent = _every_second_attends(model)
    model.output()
    for layer, is_recurrent in zip(model.layers(), recurrent, strict=True):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        if is_recurrent:
            _mamba2(model, layer, *sizes)
        else:
            model.query_key_value(layer)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.gated_feed_forward(layer)


def _add_nemotron_h(model: TinyModel) -> None:
    """A layer is Mamba 2, attention that does not rotate, or a feed-forward block, in turns."""
    sizes = (model.n_embd, 4, 2)
    n_head_kv = model.n_embd_kv // model.head_size
    kinds = [i % 3 for i in range(model.n_layer)]  # 0: recurrent, 1: attention, 2: feed-forward
    model.n_head_kv = [n_head_kv if kind == 1 else 0 for kind in kinds]
    del model.writer.kv_data[0][Keys.LLM.FEED_FORWARD_LENGTH.format(arch=model.writer.arch)]
    model.writer.add_feed_forward_length([model.n_ff if kind == 2 else 0 for kind in kinds])
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_key_length(model.head_size)
    model.writer.add_value_length(model.head_size)
    _add_mamba2(model, *sizes)
    model.output()
    for layer, kind in zip(model.layers(), kinds, strict=True):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        if kind == 0:
            _mamba2(model, layer, *sizes)
        elif kind == 1:
            model.query_key_value(layer)
        else:
            model.random_matrix(f"{layer}.ffn_up", model.n_ff, model.n_embd)
            model.random_matrix(f"{layer}.ffn_down", model.n_embd, model.n_ff, gain=OUTPUT_GAIN)


def _add_falcon_h1(model: TinyModel) -> None:
    """Attention and Mamba 2 side by side in each layer: a KV cache and a state in all."""
    sizes = (model.n_embd, 4, 1)
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_key_length(model.head_size)
    model.writer.add_value_length(model.head_size)
    model.writer.add_rope_dimension_count(model.head_size)
    model.writer.add_rope_freq_base(10000.0)
    _add_mamba2(model, *sizes)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        _mamba2(model, layer, *sizes, norm=False)
        # llama.cpp wants this without ".weight"
        model.vector(f"{layer}.ffn_norm", 1 + model.normal(model.n_embd) / 10)
        model.gated_feed_forward(layer)


def _add_jamba(model: TinyModel) -> None:
    """Every second layer is Mamba with norms of its own, the others do not rotate."""
    n_inner, n_step = 2 * model.n_embd, 32
    model.writer.add_layer_norm_rms_eps(1e-6)
    model.writer.add_ssm_conv_kernel(N_KERNEL)
    model.writer.add_ssm_inner_size(n_inner)
    model.writer.add_ssm_state_size(N_STATE)
    model.writer.add_ssm_time_step_rank(n_step)
    recurrent = _every_second_attends(model)
    model.output()
    for layer, is_recurrent in zip(model.layers(), recurrent, strict=True):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        if is_recurrent:
            model.random_matrix(f"{layer}.ssm_in", 2 * n_inner, model.n_embd)
            convolution(model, layer, n_inner)
            model.vector(f"{layer}.ssm_conv1d.bias", model.normal(n_inner) / 10)
            model.random_matrix(f"{layer}.ssm_x", n_step + 2 * N_STATE, n_inner)
            model.norm(f"{layer}.ssm_dt_norm", n_step)
            model.norm(f"{layer}.ssm_b_norm", N_STATE)
            model.norm(f"{layer}.ssm_c_norm", N_STATE)
            model.random_matrix(f"{layer}.ssm_dt", n_inner, n_step, gain=0.5)
            model.vector(f"{layer}.ssm_dt.bias", before_softplus(np.geomspace(0.002, 0.5, n_inner)))
            model.vector(f"{layer}.ssm_a", -np.exp(model.normal(n_inner, N_STATE) / 4))
            model.vector(f"{layer}.ssm_d", model.normal(n_inner))
            # the gate halves the output
            model.random_matrix(f"{layer}.ssm_out", model.n_embd, n_inner, gain=2 * OUTPUT_GAIN)
        else:
            model.query_key_value(layer)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.gated_feed_forward(layer)


def _add_qwen2vl(model: TinyModel) -> None:
    """M-RoPE: the pairs of a head are in sections, with positions that only images tell apart."""
    model.writer.add_layer_norm_rms_eps(1e-6)
    later = 3 * model.head_size // 16
    model.writer.add_rope_dimension_sections([model.head_size // 2 - 2 * later, later, later, 0])
    model.writer.add_rope_freq_base(10000.0)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        model.vector(f"{layer}.attn_q.bias", model.normal(model.n_embd))
        model.vector(f"{layer}.attn_k.bias", model.normal(model.n_embd_kv))
        model.vector(f"{layer}.attn_v.bias", model.normal(model.n_embd_kv))
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.gated_feed_forward(layer)


def _add_qwen3vl(model: TinyModel) -> None:
    """M-RoPE whose sections are interleaved, after a norm of queries and keys."""
    model.writer.add_layer_norm_rms_eps(1e-6)
    model.writer.add_key_length(model.head_size)
    model.writer.add_value_length(model.head_size)
    model.writer.add_rope_dimension_sections(_interleaved(model.head_size // 2))
    model.writer.add_rope_freq_base(10000.0)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        normed_query_and_key(model, layer)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.gated_feed_forward(layer)


# Name of the variant, which is llama.cpp's of the architecture: that name, and what adds its fields
# and tensors. Three layers have at least one of each kind. The first three have their real
# pattern from four layers on: three recurrent ones, then attention. In "lfm2", "granitehybrid" and
# "jamba" odd layers attend; in "nemotron_h" layers 1, 4, 7 ...; in the last three, all of them.
HYBRIDS: dict[str, tuple[str, Callable[[TinyModel], None]]] = {
    "qwen35": ("qwen35", _add_qwen35),
    "qwen35moe": ("qwen35moe", _add_qwen35moe),
    "qwen3next": ("qwen3next", _add_qwen3next),
    "lfm2": ("lfm2", _add_lfm2),
    "granitehybrid": ("granitehybrid", _add_granite_hybrid),
    "jamba": ("jamba", _add_jamba),
    "nemotron_h": ("nemotron_h", _add_nemotron_h),
    "falcon-h1": ("falcon-h1", _add_falcon_h1),
    "qwen2vl": ("qwen2vl", _add_qwen2vl),
    "qwen3vl": ("qwen3vl", _add_qwen3vl),
}
