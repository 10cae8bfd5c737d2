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
COMMON = {
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


def ending(weights: Weights, end: str) -> Iterator[str]:
    """The names that end so; they may be changed meanwhile."""
    yield from [name for name in weights if name.endswith(end)]


def recurrence(file: TinyFile, weights: Weights) -> None:
    """Convolutions have an axis more, decays are logarithms, what each head has is a vector."""
    for name in ending(weights, "conv1d.weight"):
        weights[name] = weights[name][:, None]
    for name in ending(weights, "ssm_a"):
        weights[name] = np.log(-weights[name])
    for end in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        for name in ending(weights, end):
            if 1 in weights[name].shape:
                weights[name] = weights[name].ravel()


def rotation(file: TinyFile, **more: Any) -> dict[str, Any]:
    theta = file["rope.freq_base"]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def transformers_logits(
    path: Path, architecture: Architecture, tokens: Sequence[int]
) -> npt.NDArray[np.floating[Any]]:
    """Of a model with an output matrix of its own and weights in F32. [n_tokens, n_vocab]"""
    torch = needed("torch", install="'.[compare]'")
    transformers = needed("transformers", install="'.[compare]'")
    file = TinyFile(path)
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
    logits: npt.NDArray[np.floating[Any]] = hidden @ output.T
    return logits
