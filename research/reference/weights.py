"""Weights of a Llama model, read from a GGUF file.

The tensors are used as stored. GGUF stores the Q and K weights of the `llama` architecture for a
rotation of neighbouring pairs (0, 1), (2, 3), ...; the converter has already permuted other
layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Hyperparameters:
    """Sizes and constants of a Llama model."""

    n_layer: int
    n_embd: int
    n_head: int  # query heads
    n_head_kv: int  # KV heads; divides n_head
    head_size: int
    rope_base: float
    rope_scale: float  # factor on positions: 1 / (linear rope scaling factor)
    rms_epsilon: float
    rope_gain: float  # factor on rotated queries and keys; 1 except for LongRoPE
    n_ctx_train: int  # trained context
    n_ctx_short: int  # original context, for LongRoPE's short factors


@dataclass(frozen=True)
class LayerWeights:
    """One transformer block. Matrices are [n_out, n_in]: y = x @ matrix.T."""

    attention_norm: FloatArray  # [n_embd]
    query: FloatArray  # [n_head * head_size, n_embd]
    key: FloatArray  # [n_head_kv * head_size, n_embd]
    value: FloatArray  # [n_head_kv * head_size, n_embd]
    attention_output: FloatArray  # [n_embd, n_head * head_size]
    ffn_norm: FloatArray  # [n_embd]
    gate: FloatArray  # [n_ff, n_embd]
    up: FloatArray  # [n_ff, n_embd]
    down: FloatArray  # [n_embd, n_ff]


@dataclass(frozen=True)
class LlamaWeights:
    """A whole model."""

    hyperparameters: Hyperparameters
    embedding: FloatArray  # [n_vocab, n_embd]
    layers: tuple[LayerWeights, ...]
    output_norm: FloatArray  # [n_embd]
    output: FloatArray  # [n_vocab, n_embd]; the embedding itself if the file ties them
    rope_factors: FloatArray  # [head_size / 2] divisors of the rotation frequencies; mostly ones


_LAYER_TENSORS = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def read_gguf(
    path: str | Path, *, dtype: npt.DTypeLike = np.float32, n_pos: int | None = None
) -> LlamaWeights:
    """Read a model of the `llama` architecture; quantised tensors are dequantised.

    Args:
        path: a GGUF file.
        dtype: floating-point type of the arrays returned.
        n_pos: positions that are used; None for the trained context. LongRoPE has factors for short
            and long contexts.

    Raises:
        ImportError: the `gguf` package is not installed.
        ValueError: the model has a feature that the reference does not compute.
    """
    # Imported here, so that the rest of the reference works with NumPy alone.
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def take(name: str) -> FloatArray:
        tensor = tensors.pop(f"{name}.weight", None)
        if tensor is None:
            raise ValueError(f"{path}: no tensor {name}.weight")
        # A copy: the file's mapping must not outlive this function.
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=dtype)

    hyperparameters = _hyperparameters(fields, str(path))
    embedding = take("token_embd")
    output = take("output") if "output.weight" in tensors else embedding
    rope_factors = np.ones(hyperparameters.head_size // 2, dtype=dtype)
    if "rope_factors_long.weight" in tensors:
        of_few, of_many = take("rope_factors_short"), take("rope_factors_long")
        is_short = (n_pos or hyperparameters.n_ctx_train) <= hyperparameters.n_ctx_short
        rope_factors = of_few if is_short else of_many
    weights = LlamaWeights(
        hyperparameters=hyperparameters,
        embedding=embedding,
        layers=tuple(
            LayerWeights(**{name: take(f"blk.{i}.{stem}") for name, stem in _LAYER_TENSORS.items()})
            for i in range(hyperparameters.n_layer)
        ),
        output_norm=take("output_norm"),
        output=output,
        rope_factors=take("rope_freqs") if "rope_freqs.weight" in tensors else rope_factors,
    )
    if tensors:
        raise ValueError(f"{path}: the reference does not compute {', '.join(sorted(tensors))}")
    return weights


def _hyperparameters(fields: Mapping[str, Any], path: str) -> Hyperparameters:
    """Check and convert the metadata of a model; optional fields default as in llama.cpp."""

    def field(key: str) -> Any:
        if f"llama.{key}" not in fields:
            raise ValueError(f"{path}: no metadata field llama.{key}")
        return fields[f"llama.{key}"]

    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: the reference computes llama models, not {architecture}")

    n_embd, n_head = field("embedding_length"), field("attention.head_count")
    n_head_kv = fields.get("llama.attention.head_count_kv", n_head)
    if np.ndim(n_head) or np.ndim(n_head_kv):
        raise ValueError(f"{path}: the reference needs the same number of heads in every layer")
    head_size = fields.get("llama.attention.key_length", n_embd // n_head)
    n_rot = fields.get("llama.rope.dimension_count", head_size)
    if n_rot != head_size:
        raise ValueError(f"{path}: {n_rot} of {head_size} elements rotated; a llama rotates all")

    scaling = fields.get("llama.rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "longrope"):
        raise ValueError(f"{path}: the reference does not compute rope scaling of type {scaling}")
    factor = fields.get("llama.rope.scaling.factor", fields.get("llama.rope.scale_linear", 1.0))
    return Hyperparameters(
        n_layer=field("block_count"),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_size=head_size,
        rope_base=fields.get("llama.rope.freq_base", 10000.0),
        rope_scale=1.0 if scaling == "none" else 1.0 / factor,
        rms_epsilon=field("attention.layer_norm_rms_epsilon"),
        rope_gain=fields.get("llama.rope.scaling.attn_factor", 1.0),
        n_ctx_train=field("context_length"),
        n_ctx_short=fields.get(
            "llama.rope.scaling.original_context_length", field("context_length")
        ),
    )
