"""Tiny random models with windowed layers, and their relatives: fields and tensors.

Windows are of `WINDOW` tokens, except that llama.cpp supports only 8192 for Llama 4's chunks.
Windowed layers come first in every pattern. The weights are scaled as in `tiny_gguf`: if queries
and keys are normed, the norms have the gain that matrices have elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tiny_model import ATTENTION_GAIN, TinyModel

WINDOW = 64
# The logits of a tied output have a common part of about half of this.
FINAL_CAP = 15.0
N_EXPERT, N_EXPERT_USED = 4, 2
# llama.cpp hard-codes these for Gemma 3n; the first layers have their own rows.
N_ALTUP, N_LAUREL, N_EMBD_ALTUP, N_OWN_ROWS = 4, 64, 256, 20
# For Gemma 4, freely chosen.
N_EMBD_PER_LAYER = 32


def _add_windows(model: TinyModel, full_every: int) -> None:
    model.store(sliding_window=WINDOW, sliding_window_pattern=full_every)


def _unscaled_gain(head_size: int) -> float:
    """Return the gain of query and key norms if products are not divided by head_size ** 0.5."""
    return float(ATTENTION_GAIN / head_size**0.25)


def _normed_feed_forward(model: TinyModel, layer: str, *, gain: float = 1.0) -> None:
    """Add Gemma's block: norms before and after, and the norm after the attention block."""
    model.norm(f"{layer}.post_attention_norm", model.n_embd, gain=gain)
    model.norm(f"{layer}.ffn_norm", model.n_embd)
    model.gated_feed_forward(layer)
    model.norm(f"{layer}.post_ffw_norm", model.n_embd, gain=gain)


def _add_gemma2(model: TinyModel) -> None:
    """Caps attention logits and output logits; every second layer attends to the whole text."""
    model.sizes(eps=1e-6, lengths=True)
    _add_windows(model, 2)
    model.store(attn_logit_softcapping=6.0, final_logit_softcapping=FINAL_CAP)
    model.output()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        _normed_feed_forward(model, layer)


def _gemma3_sizes(model: TinyModel) -> None:
    """Every second layer attends to the whole text, and rotates with different frequencies."""
    model.sizes(eps=1e-6, base=1000000.0, lengths=True)
    _add_windows(model, 2)
    model.store(rope_freq_base_swa=10000.0)


def _gemma3_layer(model: TinyModel, layer: str, *, gain: float, of_norms: float) -> None:
    model.norm(f"{layer}.attn_norm", model.n_embd)
    model.query_key_value(layer)
    model.head_norms(layer, gain=gain)
    _normed_feed_forward(model, layer, gain=of_norms)


def _add_gemma3(model: TinyModel) -> None:
    _gemma3_sizes(model)
    model.output()
    for layer in model.layers():
        _gemma3_layer(model, layer, gain=ATTENTION_GAIN, of_norms=1.0)


def _per_layer_embedding(model: TinyModel, size: int) -> None:
    """Add a second token embedding, a part of which goes to each layer."""
    rows = model.normal(model.n_vocab, size * model.n_layer)
    model.matrix("per_layer_token_embd", rows / np.float32(np.sqrt(size)))
    model.random_matrix("per_layer_model_proj", size * model.n_layer, model.n_embd)
    model.norm("per_layer_proj_norm", size)


def _per_layer_input(model: TinyModel, layer: str, size: int) -> None:
    """Add the tensors with which a layer uses its part of that embedding."""
    model.random_matrix(f"{layer}.inp_gate", size, model.n_embd)
    model.random_matrix(f"{layer}.proj", model.n_embd, size)
    model.norm(f"{layer}.post_norm", model.n_embd)


def _add_gemma3n(model: TinyModel) -> None:
    """Four residual streams; layers from 20 on use the rows of layers 18 and 19."""
    n_embd = model.n_embd
    # So many layers would amplify small differences.
    small = 0.5
    _gemma3_sizes(model)
    model.store(shared_kv_layers=max(0, model.n_layer - N_OWN_ROWS))
    model.store(altup_num_inputs=N_ALTUP, altup_active_idx=0)
    model.store(embedding_length_per_layer_input=N_EMBD_ALTUP)
    model.output()
    _per_layer_embedding(model, N_EMBD_ALTUP)
    for name in ("altup_proj", "altup_unembd_proj"):
        model.matrix(name, model.normal(N_ALTUP - 1, n_embd, n_embd) / np.float32(np.sqrt(n_embd)))
    for layer in model.layers():
        _gemma3_layer(model, layer, gain=_unscaled_gain(model.head_size), of_norms=small)
        _per_layer_input(model, layer, N_EMBD_ALTUP)
        # The graph divides the router's input by n_embd.
        model.random_matrix(f"{layer}.altup_router", N_ALTUP, n_embd, gain=n_embd)
        model.norm(f"{layer}.altup_router_norm", n_embd)
        # The rows are too short for blocks of a quantised type.
        model.vector(f"{layer}.altup_predict_coef.weight", model.normal(N_ALTUP**2, N_ALTUP) / 25)
        model.vector(f"{layer}.altup_correct_coef.weight", model.normal(N_ALTUP, N_ALTUP) / 25)
        model.norm(f"{layer}.altup_correct_scale", n_embd)
        model.random_matrix(f"{layer}.laurel_l", N_LAUREL, n_embd)
        model.random_matrix(f"{layer}.laurel_r", n_embd, N_LAUREL)
        model.norm(f"{layer}.laurel_post_norm", n_embd, gain=small)


def _add_gemma4_sizes(model: TinyModel, *, n_own_rows: int, n_embd_per_layer: int) -> list[bool]:
    """Add the common fields of Gemma 4 models. Return whether each layer has a window."""
    windowed = [i % 2 == 0 for i in range(model.n_layer)]
    n_rot = 2 * model.head_size
    model.sizes(eps=1e-6, base=1000000.0, n_rot=n_rot)
    model.key_and_value(n_rot)
    model.store(key_length_swa=model.head_size, value_length_swa=model.head_size)
    model.store(rope_dimension_count_swa=model.head_size, rope_freq_base_swa=10000.0)
    model.store(sliding_window=WINDOW, sliding_window_pattern=windowed)
    model.store(shared_kv_layers=model.n_layer - n_own_rows)
    model.store(embedding_length_per_layer_input=n_embd_per_layer)
    model.store(final_logit_softcapping=FINAL_CAP)
    # Full layers rotate a quarter of a head's elements: the others rotate too slowly to notice.
    factors = np.full(n_rot // 2, 1e30)
    factors[: n_rot // 8] = 1
    model.vector("rope_freqs.weight", factors)
    model.output()
    return windowed


def _gemma4_attention(
    model: TinyModel, layer: str, head_size: int, n_head_kv: int, *, rows: bool, values: bool
) -> None:
    """Add queries, and keys and values if the layer has its own rows."""
    n_embd, n_q, n_kv = model.n_embd, model.n_head * head_size, n_head_kv * head_size
    gain = _unscaled_gain(head_size)
    model.norm(f"{layer}.attn_norm", n_embd)
    model.random_matrix(f"{layer}.attn_q", n_q, n_embd)
    model.norm(f"{layer}.attn_q_norm", head_size, gain=gain)
    if rows:
        model.random_matrix(f"{layer}.attn_k", n_kv, n_embd)
        model.norm(f"{layer}.attn_k_norm", head_size, gain=gain)
        if values:
            model.random_matrix(f"{layer}.attn_v", n_kv, n_embd)
    model.random_matrix(f"{layer}.attn_output", n_embd, n_q)


def _add_gemma4(model: TinyModel) -> None:
    """Every second layer is full, with heads of twice the size; later layers use earlier rows.

    About half of all layers use the rows of the last two layers that have rows: layer 2 of three
    uses layer 0; layers 4 and 5 of six use layers 2 and 3.
    """
    n_own_rows = (model.n_layer + 2) // 4 * 2
    windowed = _add_gemma4_sizes(model, n_own_rows=n_own_rows, n_embd_per_layer=N_EMBD_PER_LAYER)
    _per_layer_embedding(model, N_EMBD_PER_LAYER)
    n_head_kv = model.n_embd_kv // model.head_size
    for i, layer in enumerate(model.layers()):
        head_size = model.head_size if windowed[i] else 2 * model.head_size
        own = i < n_own_rows
        _gemma4_attention(model, layer, head_size, n_head_kv, rows=own, values=own)
        _normed_feed_forward(model, layer)
        _per_layer_input(model, layer, N_EMBD_PER_LAYER)
        model.vector(f"{layer}.layer_output_scale.weight", 1 + model.normal(1) / 10)


def _add_gemma4_with_experts(model: TinyModel) -> None:
    """Full layers have half the KV heads, of twice the size, and values that are normed keys."""
    windowed = _add_gemma4_sizes(model, n_own_rows=model.n_layer, n_embd_per_layer=0)
    n_head_kv = model.n_embd_kv // model.head_size
    model.n_head_kv = [n_head_kv if window else max(1, n_head_kv // 2) for window in windowed]
    model.experts(N_EXPERT, N_EXPERT_USED, model.n_ff)
    for i, layer in enumerate(model.layers()):
        head_size = model.head_size if windowed[i] else 2 * model.head_size
        _gemma4_attention(
            model, layer, head_size, model.n_head_kv[i], rows=True, values=windowed[i]
        )
        _normed_feed_forward(model, layer)
        model.random_matrix(f"{layer}.ffn_gate_inp", N_EXPERT, model.n_embd)
        scale = np.sqrt(model.n_embd) * (1 + model.normal(model.n_embd) / 10)
        model.vector(f"{layer}.ffn_gate_inp.scale", scale)
        model.expert_matrices(layer, N_EXPERT, model.n_ff, fused=True)
        model.vector(f"{layer}.ffn_down_exps.scale", 1 + model.normal(N_EXPERT) / 10)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            model.norm(f"{layer}.{name}", model.n_embd)


def _add_gpt_oss(model: TinyModel) -> None:
    """Attention can go to a sink instead of a token; every second layer attends to the whole text.

    The output matrix is always separate.
    """
    model.sizes(base=150000.0, lengths=True)
    _add_windows(model, 2)
    model.yarn()
    model.experts(N_EXPERT, N_EXPERT_USED, model.n_ff)
    model.output(own=True)
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        model.attention_biases(layer, 0.5)
        model.vector(f"{layer}.attn_output.bias", model.normal(model.n_embd) / 2)
        # About as much as all keys of a window.
        model.vector(f"{layer}.attn_sinks.weight", 8 + 2 * model.normal(model.n_head))
        model.norm(f"{layer}.post_attention_norm", model.n_embd)
        model.random_matrix(f"{layer}.ffn_gate_inp", N_EXPERT, model.n_embd)
        model.vector(f"{layer}.ffn_gate_inp.bias", model.normal(N_EXPERT) / 2)
        model.expert_matrices(layer, N_EXPERT, model.n_ff)
        for name in ("gate", "up", "down"):
            n_out = model.n_embd if name == "down" else model.n_ff
            model.vector(f"{layer}.ffn_{name}_exps.bias", model.normal(N_EXPERT, n_out) / 2)


def _add_llama4(model: TinyModel) -> None:
    """Layers attend within chunks of 8192; every fourth to the whole text, without rotation.

    With fewer than four layers llama.cpp aborts at the first token. Every second layer has experts.
    The rotated layers norm queries and keys without weights, so their attention is flat.
    """
    model.sizes(base=500000.0, lengths=True)
    model.store(interleave_moe_layer_step=2)
    model.experts(N_EXPERT, 1, model.n_ff)
    model.output()
    for i, layer in enumerate(model.layers()):
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        model.norm(f"{layer}.ffn_norm", model.n_embd)
        if i % 2 == 0:
            model.gated_feed_forward(layer)
        else:
            model.random_matrix(f"{layer}.ffn_gate_inp", N_EXPERT, model.n_embd)
            model.expert_matrices(layer, N_EXPERT, model.n_ff)
            model.shared_expert(layer, model.n_ff)


def _add_cohere2(model: TinyModel) -> None:
    """Every fourth layer, or the last of fewer, attends to the whole text, unrotated.

    Blocks are parallel. The output is always the embedding.
    """
    model.sizes(base=50000.0, layer_norm=True)
    model.store(logit_scale=model.n_embd**-0.5)
    _add_windows(model, min(4, model.n_layer))
    model.norm("output_norm", model.n_embd)
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", model.n_embd)
        model.query_key_value(layer)
        model.gated_feed_forward(layer)


def _add_phi3(model: TinyModel) -> None:
    """LongRoPE without windows.

    If the model's name contains "phi3", llama.cpp expects a vocabulary like Phi 3's.
    """
    model.sizes()
    model.longrope()
    model.output()
    feed = partial(TinyModel.feed_forward, n_up=2 * model.n_ff)
    model.blocks(TinyModel.fused_query_key_value, feed)


def _add_olmo3(model: TinyModel) -> None:
    """Every fourth layer, or the last of fewer, attends to the whole text with YaRN.

    Norms apply to all heads together. The output matrix is always separate.
    """
    model.sizes(eps=1e-6, base=500000.0, lengths=True)
    _add_windows(model, min(4, model.n_layer))
    model.yarn()
    model.output(own=True)
    for layer in model.layers():
        model.query_key_value(layer)
        model.norm(f"{layer}.post_attention_norm", model.n_embd)
        model.gated_feed_forward(layer)
        model.norm(f"{layer}.post_ffw_norm", model.n_embd)
        model.norm(f"{layer}.attn_q_norm", model.n_embd, gain=ATTENTION_GAIN)
        model.norm(f"{layer}.attn_k_norm", model.n_embd_kv, gain=ATTENTION_GAIN)


# Name of the variant: llama.cpp's architecture name, and the function that adds fields and tensors.
WINDOWED: dict[str, tuple[str, Callable[[TinyModel], None]]] = {
    "sliding_window": ("gemma3", _add_gemma3),
    "gemma2": ("gemma2", _add_gemma2),
    "gemma3n": ("gemma3n", _add_gemma3n),
    "gemma4": ("gemma4", _add_gemma4),
    "gemma4_experts": ("gemma4", _add_gemma4_with_experts),
    "gpt_oss": ("gpt-oss", _add_gpt_oss),
    "llama4": ("llama4", _add_llama4),
    "cohere2": ("cohere2", _add_cohere2),
    "longrope": ("phi3", _add_phi3),
    "olmo3": ("olmo2", _add_olmo3),
}

# The output is always the embedding, and the graph scales the embedding up.
TIED = frozenset(name for name in WINDOWED if name.startswith(("gemma", "sliding_window")))
