"""The same tiny models in Hugging Face transformers: a config of a file's sizes, and its weights.

Names, and what the conversion to GGUF does to weights, are undone here: so a file is known to be a
model of its kind, not just one that loads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

FloatArray = npt.NDArray[np.float32]

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA3N_NAMES = {
    **GEMMA_NAMES,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA4_NAMES = {
    **GEMMA_NAMES,
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
GEMMA4_WHOLE_NAMES = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
LLAMA4_NAMES = {
    f"ffn_{name}{of}": f"feed_forward.{to}{name}_proj"
    for name in ("gate", "up", "down")
    for of, to in (("", ""), ("_shexp", "shared_expert."))
} | {"ffn_gate_inp": "feed_forward.router"}


class Tiny:
    """The sizes and tensors in a file."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.fields = {
            name.split(".", 1)[1]: field.contents() for name, field in reader.fields.items()
        }
        self.tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
        self.n_layer = self.fields["block_count"]

    def sizes(self) -> dict[str, Any]:
        """The arguments that nearly all configs take."""
        n_head = self.fields["attention.head_count"]
        n_head_kv = self.fields["attention.head_count_kv"]
        epsilons = {
            "rms_norm_eps": "attention.layer_norm_rms_epsilon",
            "layer_norm_eps": "attention.layer_norm_epsilon",
        }
        return {
            "vocab_size": len(self.tensors["token_embd.weight"]),
            "hidden_size": self.fields["embedding_length"],
            "intermediate_size": self.fields["feed_forward_length"],
            "num_hidden_layers": self.n_layer,
            "num_attention_heads": n_head,
            "num_key_value_heads": max(np.atleast_1d(n_head_kv).tolist()),
            "max_position_embeddings": self.fields["context_length"],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **{arg: self.fields[key] for arg, key in epsilons.items() if key in self.fields},
        }

    def head_size(self) -> dict[str, Any]:
        return {"head_dim": self.fields["rope.dimension_count"]}

    def windows(self, *, kind: str = "sliding_attention") -> dict[str, Any]:
        """The window, and which layers have it."""
        pattern = self.fields.get("attention.sliding_window_pattern", 4)
        if isinstance(pattern, int):
            pattern = [i % pattern < pattern - 1 for i in range(self.n_layer)]
        return {
            "sliding_window": self.fields.get("attention.sliding_window"),
            "layer_types": [kind if window else "full_attention" for window in pattern],
        }

    def plain_rope(self, base: str = "rope.freq_base") -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.fields[base]}

    def yarn(self) -> dict[str, Any]:
        return {
            "rope_type": "yarn",
            "rope_theta": self.fields["rope.freq_base"],
            "factor": self.fields["rope.scaling.factor"],
            "original_max_position_embeddings": self.fields["rope.scaling.original_context_length"],
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            # As ggml does, though gpt-oss does not.
            "truncate": True,
        }

    def two_ropes(self, full: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of layers with a window, and of the others."""
        has_base = "rope.freq_base_swa" in self.fields
        window = self.plain_rope("rope.freq_base_swa" if has_base else "rope.freq_base")
        return {
            "rope_parameters": {
                "sliding_attention": window,
                "full_attention": full or self.plain_rope(),
            }
        }


def _gemma2(tiny: Tiny) -> dict[str, Any]:
    return {
        **tiny.head_size(),
        **tiny.windows(),
        "rope_parameters": tiny.plain_rope(),
        "query_pre_attn_scalar": tiny.fields["attention.key_length"],
        "attn_logit_softcapping": tiny.fields["attn_logit_softcapping"],
        "final_logit_softcapping": tiny.fields["final_logit_softcapping"],
    }


def _gemma3(tiny: Tiny) -> dict[str, Any]:
    return {
        **tiny.head_size(),
        **tiny.windows(),
        **tiny.two_ropes(),
        "query_pre_attn_scalar": tiny.fields["attention.key_length"],
    }


def _gemma3n(tiny: Tiny) -> dict[str, Any]:
    return {
        **tiny.head_size(),
        **tiny.windows(),
        **tiny.two_ropes(),
        "vocab_size_per_layer_input": len(tiny.tensors["token_embd.weight"]),
        "hidden_size_per_layer_input": tiny.fields["embedding_length_per_layer_input"],
        "num_kv_shared_layers": tiny.fields["attention.shared_kv_layers"],
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.95 if i < 10 else 0.0 for i in range(tiny.n_layer)],
    }


def _gemma4(tiny: Tiny) -> dict[str, Any]:
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": tiny.fields["rope.freq_base"],
    }
    n_head_kv = tiny.fields["attention.head_count_kv"]
    with_experts = "expert_count" in tiny.fields
    experts = {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": min(np.atleast_1d(n_head_kv).tolist()),
        "enable_moe_block": True,
        "num_experts": tiny.fields.get("expert_count"),
        "top_k_experts": tiny.fields.get("expert_used_count"),
        "moe_intermediate_size": tiny.fields.get("expert_feed_forward_length"),
    }
    return {
        **tiny.windows(),
        **tiny.two_ropes(full),
        "head_dim": tiny.fields["attention.key_length_swa"],
        "global_head_dim": tiny.fields["attention.key_length"],
        "vocab_size_per_layer_input": len(tiny.tensors["token_embd.weight"]),
        "hidden_size_per_layer_input": tiny.fields["embedding_length_per_layer_input"],
        "num_kv_shared_layers": tiny.fields["attention.shared_kv_layers"],
        "final_logit_softcapping": tiny.fields["final_logit_softcapping"],
        "use_double_wide_mlp": False,
        **(experts if with_experts else {}),
    }


def _gpt_oss(tiny: Tiny) -> dict[str, Any]:
    return {
        **tiny.head_size(),
        **tiny.windows(),
        "rope_parameters": tiny.yarn(),
        "num_local_experts": tiny.fields["expert_count"],
        "num_experts_per_tok": tiny.fields["expert_used_count"],
    }


def _llama4(tiny: Tiny) -> dict[str, Any]:
    return {
        **tiny.head_size(),
        "rope_parameters": tiny.plain_rope(),
        "intermediate_size": tiny.fields["expert_feed_forward_length"],
        "intermediate_size_mlp": tiny.fields["feed_forward_length"],
        "num_local_experts": tiny.fields["expert_count"],
        "num_experts_per_tok": tiny.fields["expert_used_count"],
        "interleave_moe_layer_step": tiny.fields["interleave_moe_layer_step"],
    }


def _cohere2(tiny: Tiny) -> dict[str, Any]:
    return {
        **tiny.windows(),
        "rope_parameters": tiny.plain_rope(),
        "logit_scale": tiny.fields["logit_scale"],
        "tie_word_embeddings": True,
    }


def _phi3(tiny: Tiny) -> dict[str, Any]:
    n_trained = tiny.fields["rope.scaling.original_context_length"]
    return {
        "original_max_position_embeddings": n_trained,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": tiny.fields["rope.freq_base"],
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": n_trained,
            "short_factor": tiny.tensors["rope_factors_short.weight"].tolist(),
            "long_factor": tiny.tensors["rope_factors_long.weight"].tolist(),
        },
    }


def _olmo3(tiny: Tiny) -> dict[str, Any]:
    return {**tiny.windows(), **tiny.two_ropes(tiny.yarn())}


def _exaone4(tiny: Tiny) -> dict[str, Any]:
    if "attention.sliding_window" in tiny.fields:
        windows = tiny.windows()
    else:
        windows = {"sliding_window": None, "layer_types": ["full_attention"] * tiny.n_layer}
    return {**tiny.head_size(), **windows, "rope_parameters": tiny.plain_rope()}


class Twin(NamedTuple):
    """What makes one architecture of another project of a file."""

    model: str
    config: str
    arguments: Callable[[Tiny], dict[str, Any]]
    names: Mapping[str, str] = MappingProxyType({})
    whole_names: Mapping[str, str] = MappingProxyType({})
    # Gemma's norms multiply by 1 + weight, until Gemma 3n.
    norms_above_one: bool = False


TWINS = {
    "gemma2": Twin("Gemma2ForCausalLM", "Gemma2Config", _gemma2, GEMMA_NAMES, norms_above_one=True),
    "sliding_window": Twin(
        "Gemma3ForCausalLM", "Gemma3TextConfig", _gemma3, GEMMA_NAMES, norms_above_one=True
    ),
    "gemma3n": Twin(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        _gemma3n,
        GEMMA3N_NAMES,
        {"altup_correct_scale.weight": "altup.correct_output_scale"},
    ),
    "gemma4": Twin(
        "Gemma4ForCausalLM", "Gemma4TextConfig", _gemma4, GEMMA4_NAMES, GEMMA4_WHOLE_NAMES
    ),
    "gemma4_experts": Twin(
        "Gemma4ForCausalLM", "Gemma4TextConfig", _gemma4, GEMMA4_NAMES, GEMMA4_WHOLE_NAMES
    ),
    "gpt_oss": Twin(
        "GptOssForCausalLM",
        "GptOssConfig",
        _gpt_oss,
        {"ffn_gate_inp": "mlp.router"},
        {"attn_sinks.weight": "self_attn.sinks"},
    ),
    "llama4": Twin("Llama4ForCausalLM", "Llama4TextConfig", _llama4, LLAMA4_NAMES),
    "cohere2": Twin("Cohere2ForCausalLM", "Cohere2Config", _cohere2),
    "longrope": Twin("Phi3ForCausalLM", "Phi3Config", _phi3, {"ffn_up": "mlp.gate_up_proj"}),
    "olmo3": Twin("Olmo3ForCausalLM", "Olmo3Config", _olmo3),
    "exaone4": Twin("Exaone4ForCausalLM", "Exaone4Config", _exaone4),
}


def hf_logits(transformers: Any, torch: Any, path: Path, variant: str, text: list[int]) -> Any:
    """[n_tokens, n_vocab] as transformers computes them of a tiny model in a file."""
    twin, tiny = TWINS[variant], Tiny(path)
    config = getattr(transformers, twin.config)(
        **{**tiny.sizes(), **twin.arguments(tiny)}, attn_implementation="eager"
    )
    model = getattr(transformers, twin.model)(config).eval()
    state = {name: torch.from_numpy(np.array(data)) for name, data in hf_state(tiny, variant)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    # transformers has no keys and values where a layer reads those of another.
    assert all(re.search(r"self_attn\.[kv]_", name) for name in unexpected), unexpected
    # It has a scale of each layer that a file may do without.
    missing = [name for name in missing if not name.endswith("layer_scalar")]
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.tie_weights()
    _compute_as_ggml(torch, model)
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0].numpy()


def _compute_as_ggml(torch: Any, model: Any) -> None:
    """Where llama.cpp has chosen otherwise, in what does not matter at the size of real models."""

    class Gelu(torch.nn.Module):  # type: ignore[misc]
        """ggml has a table of halves."""

        def forward(self, x: Any) -> Any:
            gelu = torch.nn.functional.gelu(x.half().float(), approximate="tanh")
            return gelu.half().float()

    def largest(x: Any) -> Any:
        """Gemma 3n's: llama.cpp divides by n - 1 for the standard deviation."""
        return torch.relu(x - x.mean(-1, keepdim=True) - 1.6448536 * x.std(-1, keepdim=True))

    for module in model.modules():
        if "gelu" in type(getattr(module, "act_fn", None)).__name__.lower():
            module.act_fn = Gelu()
        if hasattr(module, "_gaussian_topk"):
            module._gaussian_topk = largest


def hf_state(tiny: Tiny, variant: str) -> Iterator[tuple[str, FloatArray]]:
    """The weights by the names that transformers gives them."""
    twin = TWINS[variant]
    names = {**NAMES, **twin.names}
    for full_name, data in tiny.tensors.items():
        if full_name.startswith("rope_"):
            continue
        layer, name = re.fullmatch(r"(blk\.\d+\.)?(.*)", full_name).groups()  # type: ignore[union-attr]
        prefix = layer.replace("blk", "model.layers") if layer else ""
        if name.startswith(("altup_proj", "altup_unembd_proj")):
            list_name = name.replace("_proj.weight", "_projections").replace("unembd", "unembed")
            for i, matrix in enumerate(data):
                yield f"model.{list_name}.{i}.weight", matrix
        elif name in twin.whole_names:
            yield prefix + twin.whole_names[name], data
        elif "_exps." in name:
            if name.startswith("ffn_gate"):
                up = tiny.tensors[full_name.replace("gate", "up")]
                yield prefix + _expert_names(variant, name), _gate_up(variant, data, up)
            elif name.startswith("ffn_down"):
                down = data.swapaxes(1, 2) if name.endswith("weight") else data
                yield prefix + _expert_names(variant, name), down
        else:
            stem, kind = name.rsplit(".", 1)
            above_one = twin.norms_above_one and stem.endswith("norm")
            yield f"{prefix}{names[stem]}.{kind}", data - above_one


def _expert_names(variant: str, name: str) -> str:
    block = "feed_forward" if variant == "llama4" else "mlp"
    matrix = "gate_up_proj" if name.startswith("ffn_gate") else "down_proj"
    return f"{block}.experts.{matrix}" + ("_bias" if name.endswith("bias") else "")


def _gate_up(variant: str, gate: FloatArray, up: FloatArray) -> FloatArray:
    """Gates and ups in one: by turns in gpt-oss, one after the other in Llama 4."""
    if gate.ndim == 3:
        gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    if variant == "gpt_oss":
        return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)
    return np.concatenate([gate, up], axis=-1)
