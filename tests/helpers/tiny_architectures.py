"""The architectures of tiny random models: what each stores beside the sizes, and its tensors.

Those with windows, and their relatives, are in `tiny_windowed`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import PoolingType, RopeScalingType

from tiny_model import ATTENTION_GAIN, OUTPUT_GAIN, TinyModel
from tiny_windowed import WINDOWED, add_longrope


def _add_llama(model: TinyModel) -> None:
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_rope_dimension_count(model.head_size)
    model.writer.add_rope_freq_base(10000.0)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.gated_feed_forward(layer)


def _add_llama_with_factors(model: TinyModel) -> None:
    _add_llama(model)
    factors = np.geomspace(1, 8, model.head_size // 2)
    model.vector("rope_freqs.weight", factors)


def _add_llama_with_yarn(model: TinyModel) -> None:
    _add_llama(model)
    model.writer.add_rope_scaling_type(RopeScalingType.YARN)
    model.writer.add_rope_scaling_factor(4.0)
    model.writer.add_rope_scaling_orig_ctx_len(model.n_ctx_train // 4)


def _add_llama_with_longrope(model: TinyModel) -> None:
    _add_llama(model)
    model.writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    add_longrope(model)


def _add_qwen2(model: TinyModel) -> None:
    """Rotates pairs (i, i + half), and adds a bias before."""
    _add_llama(model)
    for layer in model.layers():
        model.vector(f"{layer}.attn_q.bias", model.normal(model.n_embd))
        model.vector(f"{layer}.attn_k.bias", model.normal(model.n_embd_kv))
        model.vector(f"{layer}.attn_v.bias", model.normal(model.n_embd_kv))


def _add_stablelm(model: TinyModel) -> None:
    """Rotates a quarter of a head's elements only."""
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_rope_dimension_count(model.head_size // 4)
    model.writer.add_rope_freq_base(10000.0)
    model.output(bias=True)
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd, bias=True)
        model.query_key_value(layer)
        model.norm(f"{layer}.ffn_norm", model.n_embd, bias=True)
        model.gated_feed_forward(layer)


def _add_hunyuan(model: TinyModel) -> None:
    """Scales the elements of keys after it rotated them."""
    _add_llama(model)
    for layer in model.layers():
        model.norm(f"{layer}.attn_q_norm", model.head_size)
        model.norm(f"{layer}.attn_k_norm", model.head_size)


def _add_grok(model: TinyModel) -> None:
    """Attention logits are scaled and capped at once; the feed-forward block is the one expert."""
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_rope_dimension_count(model.head_size)
    model.writer.add_rope_freq_base(10000.0)
    model.writer.add_attn_output_scale(model.head_size**-0.5)
    model.writer.add_attn_logit_softcapping(6.0)
    model.writer.add_embedding_scale(1.0)
    model.writer.add_logit_scale(1.0)
    model.writer.add_expert_count(1)
    model.writer.add_expert_used_count(1)
    model.writer.add_expert_feed_forward_length(model.n_ff)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        model.norm(f"{layer}.attn_output_norm", model.n_embd)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.random_matrix(f"{layer}.ffn_gate_inp", 1, model.n_embd)
        for name in ("gate", "up", "down"):
            n_in = model.n_ff if name == "down" else model.n_embd
            n_out = model.n_embd if name == "down" else model.n_ff
            weights = model.normal(1, n_out, n_in) / np.sqrt(n_in)
            model.vector(f"{layer}.ffn_{name}_exps.weight", weights)
        model.norm(f"{layer}.layer_output_norm", model.n_embd)


def _add_gpt2(model: TinyModel) -> None:
    """Positions enter as an embedding of their own, which all later layers compute with."""
    model.writer.add_layer_norm_eps(1e-5)
    model.vector("position_embd.weight", model.normal(model.n_ctx_train, model.n_embd))
    model.output(bias=True)
    n_qkv = model.n_embd + 2 * model.n_embd_kv
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd, bias=True)
        model.random_matrix(f"{layer}.attn_qkv", n_qkv, model.n_embd, gain=ATTENTION_GAIN)
        model.vector(f"{layer}.attn_qkv.bias", model.normal(n_qkv) / 10)
        model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd, gain=OUTPUT_GAIN)
        model.vector(f"{layer}.attn_output.bias", model.normal(model.n_embd) / 10)
        model.norm(f"{layer}.ffn_norm", model.n_embd, bias=True)
        model.random_matrix(f"{layer}.ffn_up", model.n_ff, model.n_embd)
        model.vector(f"{layer}.ffn_up.bias", model.normal(model.n_ff) / 10)
        model.random_matrix(f"{layer}.ffn_down", model.n_embd, model.n_ff, gain=OUTPUT_GAIN)
        model.vector(f"{layer}.ffn_down.bias", model.normal(model.n_embd) / 10)


def _add_mamba(model: TinyModel) -> None:
    """A state instead of a KV cache."""
    n_inner, n_state, n_step, n_kernel = 2 * model.n_embd, 16, 32, 4
    model.writer.add_ssm_conv_kernel(n_kernel)
    model.writer.add_ssm_inner_size(n_inner)
    model.writer.add_ssm_state_size(n_state)
    model.writer.add_ssm_time_step_rank(n_step)
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.random_matrix(f"{layer}.ssm_in", 2 * n_inner, model.n_embd)
        model.vector(f"{layer}.ssm_conv1d.weight", model.normal(n_inner, n_kernel) / 2)
        model.vector(f"{layer}.ssm_conv1d.bias", model.normal(n_inner) / 10)
        model.random_matrix(f"{layer}.ssm_x", n_step + 2 * n_state, n_inner)
        model.random_matrix(f"{layer}.ssm_dt", n_inner, n_step)
        model.vector(f"{layer}.ssm_dt.bias", model.normal(n_inner) / 10)
        model.vector(f"{layer}.ssm_a", -np.exp(model.normal(n_inner, n_state)))
        model.vector(f"{layer}.ssm_d", model.normal(n_inner))
        model.random_matrix(f"{layer}.ssm_out", model.n_embd, n_inner)


def _add_bloom(model: TinyModel) -> None:
    """Positions enter as a bias on the attention logits (ALiBi)."""
    model.writer.add_layer_norm_eps(1e-5)
    model.norm("token_embd_norm", model.n_embd, bias=True)
    model.output(bias=True)
    n_qkv = model.n_embd + 2 * model.n_embd_kv
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd, bias=True)
        model.random_matrix(f"{layer}.attn_qkv", n_qkv, model.n_embd)
        model.vector(f"{layer}.attn_qkv.bias", model.normal(n_qkv) / 10)
        model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd)
        model.vector(f"{layer}.attn_output.bias", model.normal(model.n_embd) / 10)
        model.norm(f"{layer}.ffn_norm", model.n_embd, bias=True)
        model.random_matrix(f"{layer}.ffn_up", model.n_ff, model.n_embd)
        model.vector(f"{layer}.ffn_up.bias", model.normal(model.n_ff) / 10)
        model.random_matrix(f"{layer}.ffn_down", model.n_embd, model.n_ff)
        model.vector(f"{layer}.ffn_down.bias", model.normal(model.n_embd) / 10)


def _add_bert(model: TinyModel) -> None:
    """Every token sees the whole text at once; there is no cache."""
    model.writer.add_layer_norm_eps(1e-12)
    model.writer.add_causal_attention(False)
    model.writer.add_pooling_type(PoolingType.MEAN)
    model.writer.add_token_type_count(2)
    # llama.cpp adds rows of these as they lie, which it does in F32 only.
    model.vector("token_types.weight", model.normal(2, model.n_embd))
    model.vector("position_embd.weight", model.normal(model.n_ctx_train, model.n_embd))
    model.norm("token_embd_norm", model.n_embd, bias=True)
    for layer in model.layers():
        model.query_key_value(layer)
        model.norm(f"{layer}.attn_output_norm", model.n_embd, bias=True)
        model.random_matrix(f"{layer}.ffn_up", model.n_ff, model.n_embd)
        model.random_matrix(f"{layer}.ffn_down", model.n_embd, model.n_ff)
        model.norm(f"{layer}.layer_output_norm", model.n_embd, bias=True)


def _add_deepseek2(model: TinyModel) -> None:
    """All heads share one compressed row (multi-head latent attention)."""
    model.n_head_kv = 1
    n_latent, n_query_latent = 64, 64
    n_rot = model.head_size // 2
    n_plain = model.head_size - n_rot
    model.writer.add_layer_norm_rms_eps(1e-6)
    model.writer.add_leading_dense_block_count(model.n_layer)
    model.writer.add_q_lora_rank(n_query_latent)
    model.writer.add_kv_lora_rank(n_latent)
    model.writer.add_key_length(n_latent + n_rot)
    model.writer.add_value_length(n_latent)
    model.writer.add_key_length_mla(model.head_size)
    model.writer.add_value_length_mla(model.head_size)
    model.writer.add_expert_feed_forward_length(model.n_ff)
    model.writer.add_expert_shared_count(0)
    model.writer.add_rope_dimension_count(n_rot)
    model.writer.add_rope_freq_base(10000.0)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.random_matrix(f"{layer}.attn_q_a", n_query_latent, model.n_embd)
        model.norm(f"{layer}.attn_q_a_norm", n_query_latent)
        model.random_matrix(f"{layer}.attn_q_b", model.n_embd, n_query_latent)
        model.random_matrix(f"{layer}.attn_kv_a_mqa", n_latent + n_rot, model.n_embd)
        model.norm(f"{layer}.attn_kv_a_norm", n_latent)
        n_head, head_size = model.n_head, model.head_size
        scale = np.float32(1 / np.sqrt(n_latent))
        model.vector(f"{layer}.attn_k_b.weight", model.normal(n_head, n_latent, n_plain) * scale)
        model.vector(f"{layer}.attn_v_b.weight", model.normal(n_head, head_size, n_latent) * scale)
        model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.gated_feed_forward(layer)


# Name of the variant: llama.cpp's name of the architecture, and what adds its fields and tensors.
ARCH_VARIANTS: dict[str, tuple[str, Callable[[TinyModel], None]]] = {
    "llama": ("llama", _add_llama),
    "frequency_factors": ("llama", _add_llama_with_factors),
    "yarn": ("llama", _add_llama_with_yarn),
    "llama_longrope": ("llama", _add_llama_with_longrope),
    "neox": ("qwen2", _add_qwen2),
    "partial": ("stablelm", _add_stablelm),
    "every_fourth_unrotated": ("smollm3", _add_llama),
    "normed_after_rope": ("hunyuan-dense", _add_hunyuan),
    "capped": ("grok", _add_grok),
    "learned_positions": ("gpt2", _add_gpt2),
    "recurrent": ("mamba", _add_mamba),
    "alibi": ("bloom", _add_bloom),
    "encoder": ("bert", _add_bert),
    "mla": ("deepseek2", _add_deepseek2),
    **WINDOWED,
}
