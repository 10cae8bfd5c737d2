"""The models of `tiny_hybrids` as transformers has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from in_transformers import COMMON, Architecture, TinyFile, Weights, ending, recurrence, rotation

_MAMBA = {
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
}


def _mamba2(file: TinyFile) -> dict[str, Any]:
    n_head = file["ssm.time_step_rank"]
    return {
        "mamba_n_heads": n_head,
        "mamba_n_groups": file["ssm.group_count"],
        "mamba_d_state": file["ssm.state_size"],
        "mamba_d_head": file["ssm.inner_size"] // n_head,
        "mamba_d_conv": file["ssm.conv_kernel"],
        "mamba_expand": file["ssm.inner_size"] // file["embedding_length"],
    }


_DELTA_NET = {
    **COMMON,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    **{name: there.replace("mamba", "linear_attn") for name, there in _MAMBA.items()},
}
_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}


def _delta_net(file: TinyFile) -> dict[str, Any]:
    interval = file["full_attention_interval"]
    return {
        "head_dim": file.head_size,
        "linear_conv_kernel_dim": file["ssm.conv_kernel"],
        "linear_key_head_dim": file["ssm.state_size"],
        "linear_value_head_dim": file["ssm.state_size"],
        "linear_num_key_heads": file["ssm.group_count"],
        "linear_num_value_heads": file["ssm.time_step_rank"],
        "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(file["block_count"])
        ],
    }


def _rotation_of_a_part(file: TinyFile, **more: Any) -> dict[str, Any]:
    share = file["rope.dimension_count"] / file.head_size
    return rotation(file, partial_rotary_factor=share, **more)


def _qwen35(file: TinyFile) -> dict[str, Any]:
    sections = file["rope.dimension_sections"][:3]
    return {
        **_delta_net(file),
        **_rotation_of_a_part(file, mrope_section=sections, mrope_interleaved=True),
    }


def _experts(file: TinyFile) -> dict[str, Any]:
    return {
        "num_experts": file["expert_count"],
        "num_experts_per_tok": file["expert_used_count"],
        "moe_intermediate_size": file["expert_feed_forward_length"],
        "shared_expert_intermediate_size": file["expert_shared_feed_forward_length"],
    }


def _expert_weights(weights: Weights) -> None:
    """Gate and up of all experts are one, and the gate of the shared one is a matrix."""
    for name in ending(weights, "ffn_gate_exps.weight"):
        up = weights.pop(name.replace("gate", "up"))
        weights[name] = np.concatenate([weights[name], up], axis=1)
    for name in ending(weights, "ffn_gate_inp_shexp.weight"):
        weights[name] = weights[name][None]


def _less_one(weights: Weights) -> None:
    """Norms are 1 more than their weights, but for that of the delta net."""
    for name in ending(weights, "norm.weight"):
        if "ssm" not in name:
            weights[name] -= 1


def _qwen35_weights(file: TinyFile, weights: Weights) -> None:
    """Value heads lie beside those with the same key head."""
    recurrence(file, weights)
    _less_one(weights)
    n_key, n_value, size = (
        file[f"ssm.{name}"] for name in ("group_count", "time_step_rank", "state_size")
    )
    heads = np.arange(n_value).reshape(n_value // n_key, n_key).T.ravel()
    channels = (heads[:, None] * size + np.arange(size)).ravel()
    mixed = np.concatenate([np.arange(2 * n_key * size), 2 * n_key * size + channels])
    for end, order in {
        "attn_qkv.weight": mixed,
        "ssm_conv1d.weight": mixed,
        "attn_gate.weight": channels,
        "ssm_dt.bias": heads,
        "ssm_a": heads,
        "ssm_beta.weight": heads,
        "ssm_alpha.weight": heads,
    }.items():
        for name in ending(weights, end):
            weights[name] = weights[name][order]
    for name in ending(weights, "ssm_out.weight"):
        weights[name] = weights[name][:, channels]


def _qwen35moe_weights(file: TinyFile, weights: Weights) -> None:
    _qwen35_weights(file, weights)
    _expert_weights(weights)


def _qwen3next_weights(file: TinyFile, weights: Weights) -> None:
    """All of a key head lies together: query, key, values and the gates of these."""
    recurrence(file, weights)
    _less_one(weights)
    _expert_weights(weights)
    n_key, size = file["ssm.group_count"], file["ssm.state_size"]
    for name in ending(weights, "attn_qkv.weight"):
        parts = np.split(weights[name], [n_key * size, 2 * n_key * size])
        parts.append(weights.pop(name.replace("qkv", "gate")))
        heads = [part.reshape(n_key, -1, part.shape[1]) for part in parts]
        weights[name] = np.concatenate(heads, axis=1).reshape(-1, parts[0].shape[1])


def _lfm2_weights(file: TinyFile, weights: Weights) -> None:
    for name in ending(weights, "shortconv.conv.weight"):
        weights[name] = weights[name][:, None]


def _granite(file: TinyFile) -> dict[str, Any]:
    return {
        "embedding_multiplier": file["embedding_scale"],
        "residual_multiplier": file["residual_scale"],
        "attention_multiplier": file["attention.scale"],
        "num_local_experts": 0,
        "shared_intermediate_size": file["feed_forward_length"],
        "position_embedding_type": None,
        "layer_types": file.kinds("mamba", "attention"),
        **_mamba2(file),
    }


def _granite_weights(file: TinyFile, weights: Weights) -> None:
    """Gate and up are one matrix."""
    recurrence(file, weights)
    for name in ending(weights, "ffn_gate.weight"):
        up = weights.pop(name.replace("gate", "up"))
        weights[name] = np.concatenate([weights[name], up])


def _nemotron(file: TinyFile) -> dict[str, Any]:
    feeds = file["feed_forward_length"]
    kinds = file.kinds("linear_attention", "full_attention")
    return {
        "layers_block_type": ["mlp" if n else kind for n, kind in zip(feeds, kinds, strict=True)],
        "layer_norm_epsilon": file["attention.layer_norm_rms_epsilon"],
        "head_dim": file.head_size,
        "mamba_num_heads": file["ssm.time_step_rank"],
        "mamba_head_dim": file["ssm.inner_size"] // file["ssm.time_step_rank"],
        "n_groups": file["ssm.group_count"],
        "ssm_state_size": file["ssm.state_size"],
        "conv_kernel": file["ssm.conv_kernel"],
        "time_step_min": 1e-6,  # it limits steps, which llama.cpp does not
    }


def _nemotron_weights(file: TinyFile, weights: Weights) -> None:
    """The norm of the groups is one vector."""
    recurrence(file, weights)
    for name in ending(weights, "ssm_norm.weight"):
        weights[name] = weights[name].ravel()


# Of variants of `write_tiny_gguf`.
HYBRIDS = {
    "qwen2vl": Architecture(
        "Qwen2VLTextModel",
        "Qwen2VLTextConfig",
        lambda file: rotation(file, mrope_section=file["rope.dimension_sections"][:3]),
        COMMON,
    ),
    "qwen3vl": Architecture(
        "Qwen3VLTextModel",
        "Qwen3VLTextConfig",
        lambda file: {
            "head_dim": file.head_size,
            **rotation(
                file, mrope_section=file["rope.dimension_sections"][:3], mrope_interleaved=True
            ),
        },
        COMMON,
    ),
    "qwen35": Architecture(
        "Qwen3_5TextModel", "Qwen3_5TextConfig", _qwen35, _DELTA_NET, _qwen35_weights
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeTextModel",
        "Qwen3_5MoeTextConfig",
        lambda file: {**_qwen35(file), **_experts(file)},
        {**_DELTA_NET, **_EXPERTS},
        _qwen35moe_weights,
    ),
    "qwen3next": Architecture(
        "Qwen3NextModel",
        "Qwen3NextConfig",
        lambda file: {**_delta_net(file), **_experts(file), **_rotation_of_a_part(file)},
        {
            **_DELTA_NET,
            **_EXPERTS,
            "attn_qkv.weight": "linear_attn.in_proj_qkvz.weight",
            "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
        },
        _qwen3next_weights,
    ),
    "lfm2": Architecture(
        "Lfm2Model",
        "Lfm2Config",
        lambda file: {
            "norm_eps": file["attention.layer_norm_rms_epsilon"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": file["shortconv.l_cache"],
            "layer_types": file.kinds("conv", "full_attention"),
            **rotation(file),
        },
        {
            **COMMON,
            "token_embd_norm.weight": "embedding_norm.weight",
            "attn_norm.weight": "operator_norm.weight",
            "ffn_norm.weight": "ffn_norm.weight",
            "attn_q_norm.weight": "self_attn.q_layernorm.weight",
            "attn_k_norm.weight": "self_attn.k_layernorm.weight",
            "attn_output.weight": "self_attn.out_proj.weight",
            "shortconv.in_proj.weight": "conv.in_proj.weight",
            "shortconv.conv.weight": "conv.conv.weight",
            "shortconv.out_proj.weight": "conv.out_proj.weight",
            "ffn_gate.weight": "feed_forward.w1.weight",
            "ffn_up.weight": "feed_forward.w3.weight",
            "ffn_down.weight": "feed_forward.w2.weight",
        },
        _lfm2_weights,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridModel",
        "GraniteMoeHybridConfig",
        _granite,
        {
            **COMMON,
            **_MAMBA,
            "ffn_gate.weight": "shared_mlp.input_linear.weight",
            "ffn_down.weight": "shared_mlp.output_linear.weight",
        },
        _granite_weights,
    ),
    "falcon-h1": Architecture(
        "FalconH1Model",
        "FalconH1Config",
        lambda file: {
            "mamba_d_ssm": file["ssm.inner_size"],
            **_mamba2(file),
            **rotation(file),
        },
        {
            **COMMON,
            **_MAMBA,
            "output_norm.weight": "final_layernorm.weight",
            "ffn_norm": "pre_ff_layernorm.weight",
            "ffn_gate.weight": "feed_forward.gate_proj.weight",
            "ffn_up.weight": "feed_forward.up_proj.weight",
            "ffn_down.weight": "feed_forward.down_proj.weight",
        },
        recurrence,
    ),
    "jamba": Architecture(
        "JambaModel",
        "JambaConfig",
        lambda file: {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": file["ssm.state_size"],
            "mamba_d_conv": file["ssm.conv_kernel"],
            "mamba_dt_rank": file["ssm.time_step_rank"],
        },
        {
            **COMMON,
            **_MAMBA,
            "output_norm.weight": "final_layernorm.weight",
            "ffn_norm.weight": "pre_ff_layernorm.weight",
            "ssm_x.weight": "mamba.x_proj.weight",
            "ssm_dt.weight": "mamba.dt_proj.weight",
            "ssm_dt.bias": "mamba.dt_proj.bias",
            "ssm_dt_norm.weight": "mamba.dt_layernorm.weight",
            "ssm_b_norm.weight": "mamba.b_layernorm.weight",
            "ssm_c_norm.weight": "mamba.c_layernorm.weight",
            "ffn_gate.weight": "feed_forward.gate_proj.weight",
            "ffn_up.weight": "feed_forward.up_proj.weight",
            "ffn_down.weight": "feed_forward.down_proj.weight",
        },
        recurrence,
    ),
    "nemotron_h": Architecture(
        "NemotronHModel",
        "NemotronHConfig",
        _nemotron,
        {
            **{name: there.replace("mamba", "mixer") for name, there in _MAMBA.items()},
            "token_embd.weight": "embeddings.weight",
            "output_norm.weight": "norm_f.weight",
            "attn_norm.weight": "norm.weight",
            "attn_q.weight": "mixer.q_proj.weight",
            "attn_k.weight": "mixer.k_proj.weight",
            "attn_v.weight": "mixer.v_proj.weight",
            "attn_output.weight": "mixer.o_proj.weight",
            "ffn_up.weight": "mixer.up_proj.weight",
            "ffn_down.weight": "mixer.down_proj.weight",
        },
        _nemotron_weights,
    ),
}
