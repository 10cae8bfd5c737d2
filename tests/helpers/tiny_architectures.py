"""Architectures of tiny random models: their header fields and tensors.

`tiny_windowed` has those with windows and their relatives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from gguf import PoolingType, RopeScalingType

from tiny_hybrids import mamba
from tiny_model import TinyModel
from tiny_windowed import WINDOWED


def _add_llama(model: TinyModel) -> None:
    model.sizes()
    model.output()
    model.blocks(TinyModel.query_key_value)


def _add_llama_with_factors(model: TinyModel) -> None:
    _add_llama(model)
    model.vector("rope_freqs.weight", np.geomspace(1, 8, model.head_size // 2))


def _add_llama_with_yarn(model: TinyModel) -> None:
    _add_llama(model)
    model.yarn()


def _add_llama_with_longrope(model: TinyModel) -> None:
    _add_llama(model)
    model.store(rope_scaling_type=RopeScalingType.LONGROPE)
    model.longrope()


def _add_qwen2(model: TinyModel) -> None:
    """Rotate pairs (i, i + half), and add a bias before."""
    _add_llama(model)
    for layer in model.layers():
        model.attention_biases(layer)


def _add_stablelm(model: TinyModel) -> None:
    """Rotate only a quarter of a head's elements."""
    model.sizes(n_rot=model.head_size // 4, layer_norm=True)
    model.output(bias=True)
    model.blocks(TinyModel.query_key_value, bias=True)


def _add_hunyuan(model: TinyModel) -> None:
    """Scale the elements of keys after their rotation."""
    _add_llama(model)
    for layer in model.layers():
        model.head_norms(layer, gain=1.0)


def _add_grok(model: TinyModel) -> None:
    """Attention logits are scaled and capped; the feed-forward block is the only expert."""
    model.sizes()
    model.store(attn_output_scale=model.head_size**-0.5, attn_logit_softcapping=6.0)
    model.store(embedding_scale=1.0, logit_scale=1.0)
    model.experts(1, 1, model.n_ff)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        model.norm(f"{layer}.attn_output_norm", model.n_embd)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        model.random_matrix(f"{layer}.ffn_gate_inp", 1, model.n_embd)
        model.expert_matrices(layer, 1, model.n_ff)
        model.norm(f"{layer}.layer_output_norm", model.n_embd)


def _add_gpt2(model: TinyModel) -> None:
    """Positions are added as an embedding, so all later layers depend on them."""
    model.store(layer_norm_eps=1e-5)
    model.vector("position_embd.weight", model.normal(model.n_ctx_train, model.n_embd))
    model.output(bias=True)
    attend = partial(TinyModel.fused_query_key_value, bias=True)
    model.blocks(attend, partial(TinyModel.feed_forward, bias=True), bias=True)


def _add_mamba(model: TinyModel) -> None:
    """A recurrent state instead of a KV cache."""
    model.store(layer_norm_rms_eps=1e-5)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        mamba(model, layer, norms=False)


def _add_bloom(model: TinyModel) -> None:
    """Positions enter as a bias on attention logits (ALiBi)."""
    model.store(layer_norm_eps=1e-5)
    model.norm("token_embd_norm", model.n_embd, bias=True)
    model.output(bias=True)
    attend = partial(TinyModel.fused_query_key_value, gain=1.0, out_gain=1.0, bias=True)
    model.blocks(attend, partial(TinyModel.feed_forward, out_gain=1.0, bias=True), bias=True)


def _add_bert(model: TinyModel) -> None:
    """Every token attends to the whole text; there is no cache."""
    model.store(layer_norm_eps=1e-12, causal_attention=False, pooling_type=PoolingType.MEAN)
    model.store(token_type_count=2)
    # llama.cpp adds these rows without conversion, which works only in F32.
    model.vector("token_types.weight", model.normal(2, model.n_embd))
    model.vector("position_embd.weight", model.normal(model.n_ctx_train, model.n_embd))
    model.norm("token_embd_norm", model.n_embd, bias=True)
    for layer in model.layers():
        model.query_key_value(layer)
        model.norm(f"{layer}.attn_output_norm", model.n_embd, bias=True)
        model.feed_forward(layer, out_gain=1.0)
        model.norm(f"{layer}.layer_output_norm", model.n_embd, bias=True)


def _add_deepseek2(model: TinyModel) -> None:
    """All heads share one compressed row (multi-head latent attention)."""
    model.n_head_kv = 1
    n_latent, n_rot = 64, model.head_size // 2
    n_head, n_plain = model.n_head, model.head_size - n_rot
    model.sizes(eps=1e-6, n_rot=n_rot)
    model.key_and_value(n_latent + n_rot, n_latent)
    model.store(leading_dense_block_count=model.n_layer, q_lora_rank=n_latent)
    model.store(kv_lora_rank=n_latent, key_length_mla=model.head_size)
    model.store(value_length_mla=model.head_size, expert_feed_forward_length=model.n_ff)
    model.store(expert_shared_count=0)
    model.output()

    def attend(model: TinyModel, layer: str) -> None:
        model.random_matrix(f"{layer}.attn_q_a", n_latent, model.n_embd)
        model.norm(f"{layer}.attn_q_a_norm", n_latent)
        model.random_matrix(f"{layer}.attn_q_b", model.n_embd, n_latent)
        model.random_matrix(f"{layer}.attn_kv_a_mqa", n_latent + n_rot, model.n_embd)
        model.norm(f"{layer}.attn_kv_a_norm", n_latent)
        for name, shape in (("k", (n_latent, n_plain)), ("v", (model.head_size, n_latent))):
            weights = model.normal(n_head, *shape) * np.float32(1 / np.sqrt(n_latent))
            model.vector(f"{layer}.attn_{name}_b.weight", weights)
        model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd)

    model.blocks(attend)


# Name of the variant: llama.cpp's architecture name, and the function that adds fields and tensors.
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
