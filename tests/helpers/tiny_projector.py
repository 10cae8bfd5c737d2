"""A tiny random projector (mmproj) as LLaVA has it, and pictures for it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

SIDE, PATCH = 32, 8
# Embeddings of a picture.
N_PATCHES = (SIDE // PATCH) ** 2


def write_tiny_projector(
    path: Path,
    *,
    n_embd: int = 128,
    seed: int = 5,
    kind: str = "mlp",
    n_layer: int = 2,
    width: int = 32,
) -> Path:
    """Write a vision model whose embeddings weigh about as much as those of tokens.

    Args:
        path: file to write.
        n_embd: elements of a token's embedding in the model that it is for.
        seed: of the weights.
        kind: of the projector: "mlp" (LLaVA), or "gemma3", whose pictures look ahead.
        n_layer, width: of the vision model; the last layer is not computed.
    """
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "embedding_length": width,
        "attention.head_count": 2,
        "feed_forward_length": 2 * width,
        "block_count": n_layer,
        "projection_dim": n_embd,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", size)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def matrix(name: str, *shape: int) -> None:
        scale = np.sqrt(np.prod(shape[1:]))
        writer.add_tensor(f"{name}.weight", (rng.normal(size=shape) / scale).astype(np.float32))

    def vector(name: str, size: int, mean: float = 0.0) -> None:
        writer.add_tensor(name, (mean + rng.normal(size=size) / 10).astype(np.float32))

    matrix("v.patch_embd", width, 3, PATCH, PATCH)
    matrix("v.position_embd", N_PATCHES, width)
    for norm in ("pre_ln", "post_ln"):
        vector(f"v.{norm}.weight", width, 1.0)
        vector(f"v.{norm}.bias", width)
    for layer in range(n_layer):
        block = f"v.blk.{layer}"
        for norm in ("ln1", "ln2"):
            vector(f"{block}.{norm}.weight", width, 1.0)
            vector(f"{block}.{norm}.bias", width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            matrix(f"{block}.{name}", width, width)
        matrix(f"{block}.ffn_up", 2 * width, width)
        matrix(f"{block}.ffn_down", width, 2 * width)
    if kind == "gemma3":
        matrix("mm.input_projection", width, n_embd)
        vector("mm.soft_emb_norm.weight", width, 1.0)
    else:
        matrix("mm.0", n_embd, width)
        vector("mm.0.bias", n_embd)
        matrix("mm.2", n_embd, n_embd)
        vector("mm.2.bias", n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def png(seed: int, side: int = SIDE) -> bytes:
    """A picture of random colours, as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side * 3), dtype=np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", head)
        + part(b"IDAT", zlib.compress(lines))
        + part(b"IEND", b"")
    )
