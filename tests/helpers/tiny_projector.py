"""Tiny random projectors (mmproj), with pictures and sound for them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

# Sizes of both encoders; the last layer of the picture encoder is not computed.
WIDTH, N_LAYER = 32, 2
SIDE, PATCH = 32, 8
# Embeddings per picture.
N_PATCHES = (SIDE // PATCH) ** 2
# Frames and embeddings per half minute of sound.
N_MEL, N_FRAMES, N_SOUNDS = 80, 1500, 15
RATE = 16_000
QUERY_KEY_VALUE = ("attn_q", "attn_k", "attn_v")
AUDIO_SIZES = {"num_mel_bins": N_MEL, "projector.stack_factor": N_FRAMES // N_SOUNDS}


def write_tiny_projector(
    path: Path, *, n_embd: int = 128, seed: int = 5, kind: str = "mlp", bias: float = 0.0
) -> Path:
    """Write a projector whose embeddings are about as large as those of tokens.

    Kinds are "mlp" (LLaVA, whose embeddings have the bias), "idefics3" (SmolVLM), which cuts larger
    pictures into tiles, "qwen2vl_merger" and "qwen3vl_merger", which keep the shape of a picture,
    "gemma3", whose pictures attend ahead, or "ultravox", for sound.
    """
    hears, keeps_shape = kind == "ultravox", kind.startswith("qwen")
    name, prefix = ("audio", "a") if hears else ("vision", "v")
    writer = GGUFWriter(path, "clip")
    model = _Writer(writer, np.random.default_rng(seed))
    writer.add_string("clip.projector_type", kind)
    writer.add_bool(f"clip.has_{name}_encoder", True)
    sizes = {
        "embedding_length": WIDTH,
        "attention.head_count": 2,
        "feed_forward_length": 2 * WIDTH,
        "block_count": N_LAYER,
        "projection_dim": n_embd,
        **(AUDIO_SIZES if hears else {"image_size": SIDE, "patch_size": PATCH}),
    }
    for key, size in sizes.items():
        writer.add_uint32(f"clip.{name}.{key}", size)
    writer.add_float32(f"clip.{name}.attention.layer_norm_epsilon", 1e-5)
    if hears:
        model.matrix("a.conv1d.1", WIDTH, N_MEL, 3, dtype=np.float16)
        model.matrix("a.conv1d.2", WIDTH, WIDTH, 3, dtype=np.float16)
        for number in (1, 2):
            model.vector(f"a.conv1d.{number}.bias", 1, WIDTH, 1)
        model.matrix("a.position_embd", N_FRAMES, WIDTH)
    else:
        writer.add_bool("clip.use_gelu", True)
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
        model.matrix("v.patch_embd", WIDTH, 3, PATCH, PATCH)
        if keeps_shape:
            model.vector("v.patch_embd.weight.1", WIDTH, 3, PATCH, PATCH)
        if kind == "qwen3vl_merger":
            model.vector("v.patch_embd.bias", WIDTH)
        if kind != "qwen2vl_merger":
            model.matrix("v.position_embd", N_PATCHES, WIDTH)
        model.norm("v.pre_ln")
    model.norm(f"{prefix}.post_ln")
    for layer in range(N_LAYER):
        model.block(f"{prefix}.blk.{layer}", kind)
    if kind == "idefics3":
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
        writer.add_uint32("clip.vision.preproc_image_size", 2 * SIDE)
        model.matrix("mm.model.fc", n_embd, 4 * WIDTH)
    elif kind == "gemma3":
        writer.add_uint32("clip.vision.projector.scale_factor", 1)
        model.matrix("mm.input_projection", WIDTH, n_embd)
        model.vector("mm.soft_emb_norm.weight", WIDTH, mean=1.0)
    elif hears:
        model.vector("mm.a.norm_pre.weight", WIDTH * N_FRAMES // N_SOUNDS, mean=1.0)
        model.matrix("mm.a.mlp.1", 2 * WIDTH, WIDTH * N_FRAMES // N_SOUNDS)
        model.vector("mm.a.norm_mid.weight", WIDTH, mean=1.0)
        model.matrix("mm.a.mlp.2", n_embd, WIDTH)
    else:
        model.matrix("mm.0", n_embd, 4 * WIDTH if keeps_shape else WIDTH)
        model.vector("mm.0.bias", n_embd)
        model.matrix("mm.2", n_embd, n_embd)
        model.vector("mm.2.bias", n_embd, mean=bias)
        if kind == "qwen3vl_merger":  # in addition to the input of the model's first layer
            model.norm("v.deepstack.0.norm", 4 * WIDTH)
            for part, shape in (("fc1", (4 * WIDTH, 4 * WIDTH)), ("fc2", (n_embd, 4 * WIDTH))):
                model.matrix(f"v.deepstack.0.{part}", *shape)
                model.vector(f"v.deepstack.0.{part}.bias", shape[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Writer:
    """Adds random weights."""

    def __init__(self, writer: GGUFWriter, rng: np.random.Generator) -> None:
        self._writer, self._rng = writer, rng

    def matrix(self, name: str, *shape: int, dtype: type = np.float32) -> None:
        weights = self._rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        self._writer.add_tensor(f"{name}.weight", weights.astype(dtype))

    def vector(self, name: str, *shape: int, mean: float = 0.0) -> None:
        values = mean + self._rng.normal(size=shape) / 10
        self._writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name: str, size: int = WIDTH) -> None:
        self.vector(f"{name}.weight", size, mean=1.0)
        self.vector(f"{name}.bias", size)

    def block(self, name: str, kind: str) -> None:
        """Add a layer of the encoder."""
        for norm in ("ln1", "ln2"):
            self.norm(f"{name}.{norm}")
        fused = kind == "qwen3vl_merger"
        parts = {"attn_qkv": 3 * WIDTH} if fused else dict.fromkeys(QUERY_KEY_VALUE, WIDTH)
        for part, size in (parts | {"attn_out": WIDTH}).items():
            self.matrix(f"{name}.{part}", size, WIDTH)
        for part, size in parts.items():
            if part != "attn_k" or kind == "qwen2vl_merger":
                self.vector(f"{name}.{part}.bias", size)
        self.matrix(f"{name}.ffn_up", 2 * WIDTH, WIDTH)
        self.matrix(f"{name}.ffn_down", WIDTH, 2 * WIDTH)


def png(seed: int, width: int = SIDE, height: int = 0) -> bytes:
    """Return a picture file of random colours; square without a height."""
    height = height or width
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width * 3), dtype=np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", head)
        + part(b"IDAT", zlib.compress(lines))
        + part(b"IEND", b"")
    )


def wav(seed: int, n_samples: int = RATE) -> bytes:
    """Return a second of noise as a file."""
    data = np.random.default_rng(seed).integers(-9000, 9000, n_samples, np.int16).tobytes()
    about = struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    parts = b"WAVEfmt " + about + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(parts)) + parts
