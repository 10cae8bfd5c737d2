"""Tiny random models that compute keys and values from a short latent row of each token.

llama.cpp caches the latent rows of some ("mla" of `tiny_architectures`, and "kimi-linear" here),
and the keys and values of others, as of any model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import ExpertGatingFuncType

from tiny_hybrids import N_KERNEL, N_STATE, before_softplus
from tiny_model import ATTENTION_GAIN, OUTPUT_GAIN, TinyModel

N_LATENT = 64


def _latent(model: TinyModel, layer: str) -> None:
    """Add the tensors of the latent row, and of the key elements that all heads share."""
    n_shared = model.head_size // 2
    rows = [
        model.normal(N_LATENT, model.n_embd),
        model.normal(n_shared, model.n_embd) * np.float32(ATTENTION_GAIN),
    ]
    weights = np.concatenate(rows) / np.float32(np.sqrt(model.n_embd))
    model.matrix(f"{layer}.attn_kv_a_mqa", weights)
    model.norm(f"{layer}.attn_kv_a_norm", N_LATENT)


def _keys_and_values(model: TinyModel, layer: str) -> None:
    """Add the tensors of keys and values from the latent row: a head's keys, then its values."""
    n_own, head_size = model.head_size - model.head_size // 2, model.head_size
    weights = model.normal(model.n_head, n_own + head_size, N_LATENT)
    weights[:, :n_own] *= np.float32(ATTENTION_GAIN)
    weights = weights.reshape(-1, N_LATENT) / np.float32(np.sqrt(N_LATENT))
    model.matrix(f"{layer}.attn_kv_b", weights)


def _own_attention(model: TinyModel, layer: str) -> None:
    """Add attention over keys and values that each head computes from the latent row."""
    model.random_matrix(f"{layer}.attn_q", model.n_embd, model.n_embd, gain=ATTENTION_GAIN)
    _latent(model, layer)
    _keys_and_values(model, layer)
    model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd, gain=OUTPUT_GAIN)


def _add_plm(model: TinyModel) -> None:
    """Each head caches its own keys and values, whatever number was requested.

    The embedding is always the output matrix.
    """
    model.n_head_kv = model.n_head
    model.sizes(n_rot=model.head_size // 2, lengths=True)
    model.store(kv_lora_rank=N_LATENT)
    weights = 1 + model.normal(model.n_embd) / 10
    if not model.tied_output:
        # with rows of this length the logits would be far too large
        weights /= np.float32(np.sqrt(2 * model.n_embd))
    model.vector("output_norm.weight", weights)
    model.blocks(_own_attention, TinyModel.feed_forward)


def _delta_attention(model: TinyModel, layer: str) -> None:
    """Add a delta net with a gate for each channel of the keys; all heads have a state."""
    n_inner = model.n_head * N_STATE
    for name in ("q", "k", "v"):
        model.random_matrix(f"{layer}.attn_{name}", n_inner, model.n_embd)
        taps = model.normal(n_inner, 1, N_KERNEL) / 2
        model.vector(f"{layer}.ssm_conv1d_{name}.weight", taps)
    for name in ("f", "g"):
        model.random_matrix(f"{layer}.ssm_{name}_a", N_STATE, model.n_embd)
        # too narrow for the blocks of quantised types
        model.vector(f"{layer}.ssm_{name}_b.weight", model.normal(n_inner, N_STATE) / 8)
    model.random_matrix(f"{layer}.ssm_beta", model.n_head, model.n_embd)
    steps = model.rng.permutation(np.geomspace(0.002, 0.5, n_inner))
    model.vector(f"{layer}.ssm_dt.bias", before_softplus(steps))
    model.vector(f"{layer}.ssm_a", -np.exp(model.normal(model.n_head, 1) / 4))
    model.norm(f"{layer}.ssm_norm", N_STATE)
    # the gate halves the output
    model.random_matrix(f"{layer}.attn_output", model.n_embd, n_inner, gain=2 * OUTPUT_GAIN)


def _latent_attention(model: TinyModel, layer: str) -> None:
    """Add attention over latent rows; queries are projected to them as well."""
    n_own, scale = model.head_size - model.head_size // 2, np.float32(1 / np.sqrt(N_LATENT))
    model.random_matrix(f"{layer}.attn_q", model.n_embd, model.n_embd, gain=ATTENTION_GAIN)
    _latent(model, layer)
    keys = model.normal(model.n_head, N_LATENT, n_own) * np.float32(ATTENTION_GAIN)
    model.vector(f"{layer}.attn_k_b.weight", keys * scale)
    values = model.normal(model.n_head, model.head_size, N_LATENT)
    model.vector(f"{layer}.attn_v_b.weight", values * scale)
    # the one attending layer in four must matter
    model.random_matrix(f"{layer}.attn_output", model.n_embd, model.n_embd, gain=2 * OUTPUT_GAIN)


def _add_kimi_linear(model: TinyModel) -> None:
    """Three delta nets with a gate per channel, then latent attention without rotation.

    The output matrix is always separate.
    """
    interval = min(4, model.n_layer)
    recurrent = [(i + 1) % interval != 0 for i in range(model.n_layer)]
    model.sizes(n_rot=model.head_size // 2)
    # all heads share the latent row
    model.n_head_kv = [0 if is_recurrent else 1 for is_recurrent in recurrent]
    model.store(kv_lora_rank=N_LATENT)
    model.key_and_value(N_LATENT + model.head_size // 2, N_LATENT)
    model.store(key_length_mla=model.head_size, value_length_mla=model.head_size)
    model.store(ssm_conv_kernel=N_KERNEL, kda_head_dim=N_STATE)
    model.store(leading_dense_block_count=model.n_layer, expert_feed_forward_length=model.n_ff)
    model.store(expert_shared_count=0, expert_gating_func=ExpertGatingFuncType.SIGMOID)
    model.output(own=True)
    model.blocks([_delta_attention if each else _latent_attention for each in recurrent])


# Name of the variant, which is llama.cpp's architecture name: that name, and the function that adds
# its fields and tensors. "kimi-linear" has its real pattern from four layers on: three recurrent
# ones, then attention over latent rows. The others attend in all layers.
LATENT: dict[str, tuple[str, Callable[[TinyModel], None]]] = {
    "plm": ("plm", _add_plm),
    "kimi-linear": ("kimi-linear", _add_kimi_linear),
}
