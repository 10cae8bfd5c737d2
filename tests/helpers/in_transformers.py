"""Tiny models of GGUF files as Hugging Face's transformers computes them.

Each architecture says how its configuration is, what its weights are called there, and undoes what
llama.cpp's conversion does to them. It needs torch and transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from needed import needed

Weights = dict[str, npt.NDArray[np.float32]]


class TinyFile:
    """What a GGUF file with weights in F32 says."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture = self._fields["general.architecture"]
        self.weights: Weights = {tensor.name: tensor.data.copy() for tensor in reader.tensors}

    def __getitem__(self, name: str) -> Any:
        return self._fields[f"{self.architecture}.{name}"]

    def sizes(self) -> dict[str, Any]:
        """What all configurations call alike."""
        kv_heads = self["attention.head_count_kv"]
        return {
            "vocab_size": self["vocab_size"],
            "hidden_size": self["embedding_length"],
            "intermediate_size": np.max(self["feed_forward_length"]).item(),
            "num_hidden_layers": self["block_count"],
            "num_attention_heads": self["attention.head_count"],
            "num_key_value_heads": np.max(kv_heads).item(),
            "rms_norm_eps": self["attention.layer_norm_rms_epsilon"],
            "max_position_embeddings": self["context_length"],
        }

    def kinds(self, recurrent: str, attending: str) -> list[str]:
        """What each layer is, where those that attend have KV heads."""
        return [attending if count else recurrent for count in self["attention.head_count_kv"]]

    @property
    def head_size(self) -> int:
        return int(self["embedding_length"] // self["attention.head_count"])


@dataclass(frozen=True)
class Architecture:
    """How transformers has it.

    Attributes:
        model: its class, without a matrix for logits.
        config: the class of its configuration.
        settings: what its configuration has beside, or instead of, the sizes.
        names: of weights, there: those of layers without "blk.0.".
        change: undoes what the conversion did to the weights.
    """

    model: str
    config: str
    settings: Callable[[TinyFile], dict[str, Any]]
    names: dict[str, str]
    change: Callable[[TinyFile, Weights], None] = lambda file, weights: None


# Names that most have.
_COMMON = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
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
_LATENT = {
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
}


def _those(weights: Weights, end: str) -> Iterator[str]:
    yield from [name for name in weights if name.endswith(end)]


def _recurrence(file: TinyFile, weights: Weights) -> None:
    """Convolutions have an axis more, decays are logarithms, what each head has is a vector."""
    for name in _those(weights, "conv1d.weight"):
        weights[name] = weights[name][:, None]
    for name in _those(weights, "ssm_a"):
        weights[name] = np.log(-weights[name])
    for end in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        for name in _those(weights, end):
            if 1 in weights[name].shape:
                weights[name] = weights[name].ravel()


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


def _rotation(file: TinyFile, **more: Any) -> dict[str, Any]:
    theta = file["rope.freq_base"]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def _qwen35(file: TinyFile) -> dict[str, Any]:
    sections = file["rope.dimension_sections"][:3]
    share = file["rope.dimension_count"] / file.head_size
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
        **_rotation(
            file, partial_rotary_factor=share, mrope_section=sections, mrope_interleaved=True
        ),
    }


def _qwen35_weights(file: TinyFile, weights: Weights) -> None:
    """Norms are 1 more than their weights; value heads lie beside those with the same key head."""
    _recurrence(file, weights)
    for name in _those(weights, "norm.weight"):
        if "ssm" not in name:
            weights[name] -= 1
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
        for name in _those(weights, end):
            weights[name] = weights[name][order]
    for name in _those(weights, "ssm_out.weight"):
        weights[name] = weights[name][:, channels]


def _lfm2_weights(file: TinyFile, weights: Weights) -> None:
    for name in _those(weights, "shortconv.conv.weight"):
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
    _recurrence(file, weights)
    for name in _those(weights, "ffn_gate.weight"):
        up = weights.pop(name.replace("gate", "up"))
        weights[name] = np.concatenate([weights[name], up])


def _latent(file: TinyFile) -> dict[str, Any]:
    n_rot = file["rope.dimension_count"]
    return {
        "num_key_value_heads": file["attention.head_count"],
        "kv_lora_rank": file["attention.kv_lora_rank"],
        "q_lora_rank": file["attention.q_lora_rank"],
        "qk_rope_head_dim": n_rot,
        "qk_nope_head_dim": file.head_size - n_rot,
        "v_head_dim": file.head_size,
        **_rotation(file),
    }


def _deepseek_weights(file: TinyFile, weights: Weights) -> None:
    """A head's keys and values come out of one matrix."""
    for name in _those(weights, "attn_k_b.weight"):
        values = weights.pop(name.replace("k_b", "v_b"))
        joint = np.concatenate([weights.pop(name).transpose(0, 2, 1), values], axis=1)
        weights[name.replace("k_b", "kv_b")] = joint.reshape(-1, joint.shape[-1])


# Of variants of `write_tiny_gguf`.
ARCHITECTURES = {
    "qwen2vl": Architecture(
        "Qwen2VLTextModel",
        "Qwen2VLTextConfig",
        lambda file: _rotation(file, mrope_section=file["rope.dimension_sections"][:3]),
        _COMMON,
    ),
    "qwen3vl": Architecture(
        "Qwen3VLTextModel",
        "Qwen3VLTextConfig",
        lambda file: {
            "head_dim": file.head_size,
            **_rotation(
                file, mrope_section=file["rope.dimension_sections"][:3], mrope_interleaved=True
            ),
        },
        _COMMON,
    ),
    "qwen35": Architecture(
        "Qwen3_5TextModel",
        "Qwen3_5TextConfig",
        _qwen35,
        {
            **_COMMON,
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
            "attn_gate.weight": "linear_attn.in_proj_z.weight",
            "ssm_beta.weight": "linear_attn.in_proj_b.weight",
            "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
            **{name: there.replace("mamba", "linear_attn") for name, there in _MAMBA.items()},
        },
        _qwen35_weights,
    ),
    "lfm2": Architecture(
        "Lfm2Model",
        "Lfm2Config",
        lambda file: {
            "norm_eps": file["attention.layer_norm_rms_epsilon"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": file["shortconv.l_cache"],
            "layer_types": file.kinds("conv", "full_attention"),
            **_rotation(file),
        },
        {
            **_COMMON,
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
            **_COMMON,
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
            **_rotation(file),
        },
        {
            **_COMMON,
            **_MAMBA,
            "output_norm.weight": "final_layernorm.weight",
            "ffn_norm": "pre_ff_layernorm.weight",
            "ffn_gate.weight": "feed_forward.gate_proj.weight",
            "ffn_up.weight": "feed_forward.up_proj.weight",
            "ffn_down.weight": "feed_forward.down_proj.weight",
        },
        _recurrence,
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
            **_COMMON,
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
        _recurrence,
    ),
    "mla": Architecture(
        "DeepseekV3Model",
        "DeepseekV3Config",
        lambda file: {
            **_latent(file),
            "first_k_dense_replace": file["leading_dense_block_count"],
            "num_mtp_layers": 0,
        },
        {**_COMMON, **_LATENT},
        _deepseek_weights,
    ),
    "minicpm3": Architecture("MiniCPM3Model", "MiniCPM3Config", _latent, {**_COMMON, **_LATENT}),
}


def transformers_logits(
    path: Path, variant: str, tokens: Sequence[int]
) -> npt.NDArray[np.floating[Any]]:
    """Of a model with an output matrix of its own and weights in F32. [n_tokens, n_vocab]"""
    torch = needed("torch", install="'.[compare]'")
    transformers = needed("transformers", install="'.[compare]'")
    architecture, file = ARCHITECTURES[variant], TinyFile(path)
    if not hasattr(transformers, architecture.config):
        raise AssertionError(
            f"transformers {transformers.__version__} has no {architecture.config}"
        )
    settings = {**file.sizes(), **architecture.settings(file)}
    config = getattr(transformers, architecture.config)(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture.model)(config).eval()
    output = file.weights.pop("output.weight")
    architecture.change(file, file.weights)
    theirs = {}
    for name, weights in file.weights.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)", name)
        assert match is not None
        prefix = "" if match[1] is None else f"layers.{match[1]}."
        theirs[prefix + architecture.names[match[2]]] = torch.from_numpy(weights)
    model.load_state_dict(theirs)
    with torch.no_grad():
        hidden = model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0].numpy()
    return hidden @ output.T
