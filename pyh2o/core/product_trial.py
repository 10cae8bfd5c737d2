"""Compare llama.cpp with NumPy on a tiny model in each type of weights.

It runs in a separate process (`pyh2o.library.products`), which a faulty library may crash.
"""

from __future__ import annotations

import ctypes
import struct
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache.settings import EvictionSettings
from ..library.backends import Traits, cpu_library, ggml_function, traits_of
from .model import Model
from .parameters import Parameters
from .text import Text

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_VOCAB = 256, 512, 4, 2, 64
N_READ, N_SINGLE = 40, 4
"""Tokens of a prompt, which exceed the rows of a tile, and tokens evaluated one by one."""

_EPSILON = 1e-5
_NORMS = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
_ROPE_BASE = 10000.0  # llama.cpp's default
_N_ROWS = 64  # different rows of a matrix, as some types are slow to quantise
_SIZE = 1 / np.sqrt(N_EMBD)  # standard deviation of a weight
# Types with lookup tables, which ggml quantises slowly. Any bytes are valid rows: enough of
# _N_RANDOM random rows have a usual scale.
_LOOKED_UP = (b"iq1", b"iq2", b"iq3")
_N_RANDOM = 4096
_ALIGNMENT = 32
# enum gguf_type
_UINT32, _FLOAT32, _STRING = 4, 6, 8

FloatArray = npt.NDArray[np.float32]
Weights = Mapping[str, FloatArray]
"""Matrices [n_out, n_in] and norms [n_embd] of the model, by the names of the file."""

_Rows = ctypes.c_void_p
_quantize = ggml_function(
    "ggml_quantize_chunk",
    ctypes.c_size_t,
    *(ctypes.c_int, _Rows, _Rows, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _Rows),
)
_row_size = ggml_function("ggml_row_size", ctypes.c_size_t, ctypes.c_int, ctypes.c_int64)


def run(types: Iterable[int], *, on_gpus: bool, rearranged: bool) -> None:
    """Print the name of the library, then the number and the error of each type."""
    print(Path(cpu_library()).name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number in types:
            path = Path(folder) / f"{number}.gguf"
            weights = write_model(path, number)
            print(number, flush=True)
            print(error_of(path, weights, on_gpus=on_gpus, rearranged=rearranged), flush=True)


def error_of(path: Path, weights: Weights, *, on_gpus: bool, rearranged: bool) -> float:
    """Return the maximum relative error of the logits over all tokens."""
    tokens = np.random.default_rng(0).integers(0, N_VOCAB, N_READ + N_SINGLE)
    model = Model(
        str(path),
        # our attention kernels, without eviction
        EvictionSettings(hh=64, recent=64, slack=64),
        rearranged=rearranged,
        n_ctx=256,
        parameters=Parameters(
            n_gpu_layers=-1 if on_gpus else 0, n_threads=1, n_threads_batch=1, logits_all=True
        ),
    )
    with closing(model):
        text = Text(model, keeps_logits=True)
        text.eval(tokens[:N_READ].tolist())
        for token in tokens[N_READ:].tolist():
            text.eval([token])
        logits = text.all_logits[: len(tokens)].copy()
    expected = logits_of(weights, tokens)
    errors = np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(errors.max())


def write_model(path: Path, number: int) -> Weights:
    """Write a random model with matrices of a ggml type and no vocabulary; return its weights."""
    rng = np.random.default_rng(0)
    rows, values = _random_rows(number, rng)
    n_kv = N_EMBD // N_HEAD * N_HEAD_KV
    shapes = {
        "token_embd": (N_VOCAB, N_EMBD),
        "blk.0.attn_q": (N_EMBD, N_EMBD),
        "blk.0.attn_k": (n_kv, N_EMBD),
        "blk.0.attn_v": (n_kv, N_EMBD),
        "blk.0.attn_output": (N_EMBD, N_EMBD),
        "blk.0.ffn_gate": (N_FF, N_EMBD),
        "blk.0.ffn_up": (N_FF, N_EMBD),
        "blk.0.ffn_down": (N_EMBD, N_FF),
        "output": (N_VOCAB, N_EMBD),
    }
    ones = np.ones(N_EMBD, np.float32)
    weights: dict[str, FloatArray] = dict.fromkeys(_NORMS, ones)
    tensors: dict[str, tuple[int, npt.NDArray[Any]]] = dict.fromkeys(weights, (0, ones))
    for name, (n_out, n_in) in shapes.items():
        chosen = rng.integers(0, len(rows), (n_out, n_in // N_EMBD))
        tensors[name] = number, rows[chosen].reshape(n_out, -1)
        weights[name] = values[chosen].reshape(n_out, n_in)
    _write(path, tensors)
    return weights


def logits_of(weights: Weights, tokens: npt.NDArray[np.int64]) -> FloatArray:
    """Return the logits of a text, with all norm weights 1; [n_tokens, N_VOCAB]."""
    x = weights["token_embd"][tokens]
    q, k, v = (_heads(_normed(x) @ weights[f"blk.0.attn_{name}"].T) for name in "qkv")
    k, v = (np.repeat(rows, N_HEAD // N_HEAD_KV, axis=0) for rows in (k, v))
    paid: FloatArray = _rotated(q) @ _rotated(k).swapaxes(1, 2) / np.sqrt(np.float32(q.shape[-1]))
    paid[:, ~np.tri(len(tokens), dtype=bool)] = -np.inf
    paid = np.exp(paid - paid.max(axis=-1, keepdims=True))
    paid /= paid.sum(axis=-1, keepdims=True)
    x += (paid @ v).swapaxes(0, 1).reshape(x.shape) @ weights["blk.0.attn_output"].T
    y = _normed(x)
    gate = y @ weights["blk.0.ffn_gate"].T
    with np.errstate(over="ignore"):  # division by infinity gives 0, which is correct
        gate /= 1 + np.exp(-gate)
    x += (gate * (y @ weights["blk.0.ffn_up"].T)) @ weights["blk.0.ffn_down"].T
    logits: FloatArray = _normed(x) @ weights["output"].T
    return logits


def _normed(x: FloatArray) -> FloatArray:
    normed: FloatArray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(_EPSILON))
    return normed


def _heads(x: FloatArray) -> FloatArray:
    """Reshape [n_tokens, n_heads * head_size] to [n_heads, n_tokens, head_size]."""
    heads: FloatArray = x.reshape(len(x), -1, N_EMBD // N_HEAD).swapaxes(0, 1)
    return heads


def _rotated(x: FloatArray) -> FloatArray:
    """Apply RoPE to adjacent elements of [n_heads, n_tokens, head_size]."""
    frequencies = _ROPE_BASE ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = np.exp(1j * np.outer(np.arange(x.shape[1]), frequencies)).astype(np.complex64)
    pairs: npt.NDArray[np.complex64] = np.ascontiguousarray(x).view(np.complex64) * angles
    rotated: FloatArray = pairs.view(np.float32)
    return rotated


def _random_rows(number: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.uint8], FloatArray]:
    """Return quantised rows of N_EMBD weights, and their values."""
    traits, size = traits_of(number), _row_size(number, N_EMBD)
    if traits.name.startswith(_LOOKED_UP):
        return _rows_from_bytes(traits, size, rng)
    values = rng.standard_normal((_N_ROWS, N_EMBD), np.float32) * np.float32(_SIZE)
    rows = np.empty((_N_ROWS, size), np.uint8)
    importance = np.ones(N_EMBD, np.float32)  # required by some types
    _quantize(
        *(number, values.ctypes.data, rows.ctypes.data),
        *(0, _N_ROWS, N_EMBD, importance.ctypes.data),
    )
    if traits.to_float:  # all types except f32
        traits.to_float(rows.ctypes.data, values.ctypes.data, values.size)
    return rows, values


def _rows_from_bytes(
    traits: Traits, size: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], FloatArray]:
    """Return random bytes as rows, if their scales are usual, and their values."""
    rows = rng.integers(0, 256, (_N_RANDOM, size), np.uint8)
    values = np.empty((_N_RANDOM, N_EMBD), np.float32)
    traits.to_float(rows.ctypes.data, values.ctypes.data, values.size)
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = np.sqrt(np.mean(values * values, axis=-1)) / _SIZE
    usual = np.flatnonzero((sizes > 0.5) & (sizes < 2))[:_N_ROWS]
    return rows[usual], values[usual]


def _write(path: Path, tensors: Mapping[str, tuple[int, npt.NDArray[Any]]]) -> None:
    """Write a GGUF file of version 3; matrices have rows of N_EMBD or N_FF weights."""
    numbers = {
        "vocab_size": N_VOCAB,
        "context_length": 1024,
        "embedding_length": N_EMBD,
        "block_count": 1,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
    }
    entries = [
        _text("general.architecture") + struct.pack("<I", _STRING) + _text("llama"),
        _text("tokenizer.ggml.model") + struct.pack("<I", _STRING) + _text("no_vocab"),
        _text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", _FLOAT32, _EPSILON),
        *(_text(f"llama.{key}") + struct.pack("<II", _UINT32, n) for key, n in numbers.items()),
    ]
    header, data = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries)), *entries], b""
    for name, (number, rows) in tensors.items():
        n_in = N_FF if name.endswith("ffn_down") else N_EMBD
        shape = struct.pack(f"<I{rows.ndim}Q", rows.ndim, *[n_in, len(rows)][: rows.ndim])
        header.append(_text(f"{name}.weight") + shape + struct.pack("<IQ", number, len(data)))
        data += _padded(rows.tobytes())
    path.write_bytes(_padded(b"".join(header)) + data)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
