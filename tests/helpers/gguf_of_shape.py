"""Writes GGUF files without weights, whose KV cache has the shape of a large model's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

# Sizes that a cache does not depend on.
N_EMBD = N_FF = 32
N_VOCAB = 32
N_CTX_TRAIN = 131_072


@dataclass(frozen=True)
class Shape:
    """What of a model its cache depends on.

    Attributes:
        layers, heads, kv_heads, head_size: their number, and the elements of a head.
        window: tokens that a layer with a window sees; 0 if there are none.
        full_every: the layers that see everything, counted from 1, are multiples of it.
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    full_every: int = 1


def write_gguf_of_shape(path: Path, shape: Shape) -> Path:
    """Write the header of a Gemma 3, which may have windows or none, and a hole for its weights."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_block_count(shape.layers)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_sliding_window_pattern(shape.full_every)
    q, kv, size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.head_size
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    of_layer = {
        "attn_q": (q, N_EMBD),
        "attn_k": (kv, N_EMBD),
        "attn_v": (kv, N_EMBD),
        "attn_output": (N_EMBD, q),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (size,)),
        **dict.fromkeys(("ffn_up", "ffn_gate"), (N_FF, N_EMBD)),
        "ffn_down": (N_EMBD, N_FF),
        **dict.fromkeys(norms, (N_EMBD,)),
    }
    tensors = {"token_embd": (N_VOCAB, N_EMBD), "output_norm": (N_EMBD,)} | {
        f"blk.{layer}.{name}": size
        for layer in range(shape.layers)
        for name, size in of_layer.items()
    }
    n_bytes = 0
    for name, size in tensors.items():
        n_bytes += 4 * int(np.prod(size))
        writer.add_tensor_info(f"{name}.weight", size, np.dtype(np.float32), 4 * int(np.prod(size)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + n_bytes + 64 * len(tensors))
    return path
