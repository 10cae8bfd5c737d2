"""The models of `tiny_latent`, and "mla", as transformers has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from in_transformers import COMMON, Architecture, TinyFile, Weights, ending, recurrence, rotation

_LATENT = {
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
}


def _latent(file: TinyFile) -> dict[str, Any]:
    n_rot = file["rope.dimension_count"]
    return {
        "num_key_value_heads": file["attention.head_count"],
        "kv_lora_rank": file["attention.kv_lora_rank"],
        "q_lora_rank": file["attention.q_lora_rank"],
        "qk_rope_head_dim": n_rot,
        "qk_nope_head_dim": file.head_size - n_rot,
        "v_head_dim": file.head_size,
        **rotation(file),
    }


def _deepseek_weights(file: TinyFile, weights: Weights) -> None:
    """A head's keys and values come out of one matrix."""
    for name in ending(weights, "attn_k_b.weight"):
        values = weights.pop(name.replace("k_b", "v_b"))
        joint = np.concatenate([weights.pop(name).transpose(0, 2, 1), values], axis=1)
        weights[name.replace("k_b", "kv_b")] = joint.reshape(-1, joint.shape[-1])


def _kimi(file: TinyFile) -> dict[str, Any]:
    return {
        "num_key_value_heads": file["attention.head_count"],
        "kv_lora_rank": file["attention.kv_lora_rank"],
        "q_lora_rank": None,
        "qk_rope_head_dim": file["rope.dimension_count"],
        "qk_nope_head_dim": file.head_size - file["rope.dimension_count"],
        "v_head_dim": file.head_size,
        "linear_head_dim": file["kda.head_dim"],
        "linear_num_heads": file["attention.head_count"],
        "linear_conv_kernel_dim": file["ssm.conv_kernel"],
        "layer_types": file.kinds("linear_attention", "full_attention"),
        "mlp_layer_types": ["dense"] * file["block_count"],
        "pad_token_id": None,
    }


def _kimi_weights(file: TinyFile, weights: Weights) -> None:
    """The convolutions of queries, keys and values are one."""
    _deepseek_weights(file, weights)
    recurrence(file, weights)
    for name in ending(weights, "ssm_conv1d_q.weight"):
        parts = [weights.pop(name.replace("_q.", f"_{part}.")) for part in "qkv"]
        weights[name.replace("_q.", ".")] = np.concatenate(parts)
    for name in ending(weights, "ssm_a"):
        weights[name] = weights[name].reshape(1, 1, -1, 1)


# Of variants of `write_tiny_gguf`.
LATENT = {
    "mla": Architecture(
        "DeepseekV3Model",
        "DeepseekV3Config",
        lambda file: {
            **_latent(file),
            "first_k_dense_replace": file["leading_dense_block_count"],
            "num_mtp_layers": 0,
        },
        {**COMMON, **_LATENT},
        _deepseek_weights,
    ),
    "minicpm3": Architecture("MiniCPM3Model", "MiniCPM3Config", _latent, {**COMMON, **_LATENT}),
    "kimi-linear": Architecture(
        "KimiLinearModel",
        "KimiLinearConfig",
        _kimi,
        {
            **COMMON,
            **_LATENT,
            "ssm_conv1d.weight": "self_attn.conv1d.weight",
            "ssm_f_a.weight": "self_attn.forget_gate.f_a_proj.weight",
            "ssm_f_b.weight": "self_attn.forget_gate.f_b_proj.weight",
            "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
            "ssm_a": "self_attn.forget_gate.A_log",
            "ssm_beta.weight": "self_attn.b_proj.weight",
            "ssm_g_a.weight": "self_attn.g_a_proj.weight",
            "ssm_g_b.weight": "self_attn.g_b_proj.weight",
            "ssm_norm.weight": "self_attn.o_norm.weight",
        },
        _kimi_weights,
    ),
}
