"""Checked parameters of models and contexts, with llama_cpp's names.

llama.cpp crashes for some invalid values, and ignores others.
"""

from __future__ import annotations

import ctypes
import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import llama_cpp

from ..errors import SettingsError
from ..system.integers import LARGEST_INT32, check_count, convert_integers
from ..system.threads import physical_cores

# Types of the KV cache, as ggml type numbers.
KV_TYPES: dict[str, int] = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
# Other types, supported only by llama.cpp's own ops.
_OTHER_KV_TYPES: dict[str, int] = {
    "bf16": 30,  # ggml.h; llama_cpp has no name for it
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
}
QUANTIZED_KV_TYPES = (llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0)

# GGML_MAX_N_THREADS. If the system cannot start all threads, evaluation fails.
_MAX_THREADS = 512
# A negative n_gpu_layers means all layers.
_ALL_LAYERS = 2**31 - 1
# Size of a text in llama_model_kv_override.
_TEXT_BYTES = 128
# Former arguments of llama_cpp.Llama, which it ignores.
FORMER = ("n_parts", "n_gqa", "rms_norm_eps", "f16_kv", "mul_mat_q", "low_vram")

# RoPE arguments, on which rows depend.
ROPE_NAMES = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)

KVOverrides = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Parameters:
    """Arguments of `llama_cpp.Llama` for llama.cpp, with the same names and defaults.

    Attributes:
        n_gpu_layers: -1 for all; None for none, or all with RPC servers.
        n_threads, n_threads_batch: None for one per physical core.
        flash_attn: whether ggml uses flash attention; None to choose by the cache.
    """

    n_gpu_layers: int | None = None
    split_mode: int = llama_cpp.LLAMA_SPLIT_MODE_LAYER
    main_gpu: int = 0
    tensor_split: Sequence[float] | None = None
    vocab_only: bool = False
    use_mmap: bool = True
    use_mlock: bool = False
    kv_overrides: KVOverrides | None = None
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    rope_scaling_type: int | None = llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED
    pooling_type: int = llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED
    attention_type: int = llama_cpp.LLAMA_ATTENTION_TYPE_UNSPECIFIED
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_orig_ctx: int = 0
    logits_all: bool = False
    embedding: bool = False
    offload_kqv: bool = True
    flash_attn: bool | None = None
    op_offload: bool | None = None
    swa_full: bool | None = None
    no_perf: bool = False
    lora_scale: float = 1.0
    lora_path: str | None = None
    numa: bool | int = False
    type_k: int | None = None
    type_v: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_batch", "n_ubatch"):
            cure = "give 1 or more tokens"
            check_count(name, getattr(self, name), least=1, most=LARGEST_INT32, cure=cure)
        for name in ("n_threads", "n_threads_batch"):
            cure = f"give 1 to {_MAX_THREADS}, or None for one per physical core"
            check_count(name, getattr(self, name) or 0, least=0, most=_MAX_THREADS, cure=cure)
        convert_integers(self)
        for name in ("rope_freq_base", "rope_freq_scale"):
            _check_number(name, getattr(self, name), least=0.0)
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            _check_number(name, getattr(self, name), least=-math.inf)
        for name in ("type_k", "type_v"):
            _check_type(name, getattr(self, name), {**KV_TYPES, **_OTHER_KV_TYPES})
        n_most = int(llama_cpp.llama_max_devices())
        if self.tensor_split is not None and len(self.tensor_split) > n_most:
            raise SettingsError(
                f"tensor_split has {len(self.tensor_split)} parts, but llama.cpp splits a model "
                f"over at most {n_most} devices: give fewer"
            )

    @property
    def stretches_positions(self) -> bool:
        """Whether RoPE scaling is set, which allows a window beyond the trained context."""
        unscaled = (
            None,
            llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
            llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
        )
        is_scaled = self.rope_scaling_type not in unscaled
        return is_scaled or bool(self.rope_freq_base or self.rope_freq_scale)

    @property
    def needs_flash_attention(self) -> bool:
        """Whether flash attention is set, or the type of V requires it."""
        return bool(self.flash_attn) or self.type_v in QUANTIZED_KV_TYPES

    def for_model(self, *, can_be_mapped: bool) -> Any:
        """Return `llama_model_params`, which keep alive what they point at."""
        params = llama_cpp.llama_model_default_params()
        n_gpu_layers = self.n_gpu_layers or 0
        params.n_gpu_layers = _ALL_LAYERS if n_gpu_layers < 0 else n_gpu_layers
        params.split_mode = self.split_mode
        params.main_gpu = self.main_gpu
        params.vocab_only = self.vocab_only
        params.load_mode = self._load_mode(can_be_mapped=can_be_mapped and self.lora_path is None)
        if self.tensor_split is not None:
            shares = (ctypes.c_float * int(llama_cpp.llama_max_devices()))(*self.tensor_split)
            params.tensor_split = shares
            params.kept_shares = shares
        if self.kv_overrides is not None:
            overrides = _native_overrides(self.kv_overrides)
            params.kv_overrides = overrides
            params.kept_overrides = overrides
        return params

    def _load_mode(self, *, can_be_mapped: bool) -> int:
        if self.use_mmap and can_be_mapped:
            mode = "MMAP_MLOCK" if self.use_mlock else "MMAP"
        else:
            mode = "MLOCK" if self.use_mlock else "NONE"
        return int(getattr(llama_cpp, f"LLAMA_LOAD_MODE_{mode}"))

    def for_context(self, n_ctx: int) -> Any:
        """Return `llama_context_params` for `n_ctx` cells."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = self.n_batch
        params.n_ubatch = min(self.n_batch, self.n_ubatch)
        params.n_threads = self.n_threads or physical_cores()
        params.n_threads_batch = self.n_threads_batch or physical_cores()
        others = ("pooling_type", "attention_type", "offload_kqv", "no_perf", "op_offload")
        for name in (*ROPE_NAMES, *others, "swa_full", "type_k", "type_v"):
            if getattr(self, name) is not None:
                setattr(params, name, getattr(self, name))
        params.embeddings = self.embedding
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if self.needs_flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        return params


PARAMETER_NAMES = tuple(field.name for field in fields(Parameters))


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise a SettingsError for unknown arguments, with the most similar known one."""
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise SettingsError(f"unknown argument {name}: did you mean {nearest[0]}?")


def _check_number(name: str, value: Any, *, least: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        raise SettingsError(f"{name} is {value!r}: give a number, or 0 for the model's value")


def _check_type(name: str, value: Any, types: Mapping[str, int]) -> None:
    if value is not None and value not in types.values():
        names = ", ".join(f"{number} ({type_name})" for type_name, number in types.items())
        raise SettingsError(f"{name} is {value!r}, which is not a KV cache type: give {names}")


def _native_overrides(overrides: KVOverrides) -> Any:
    """Return an array of llama_model_kv_override, terminated by an empty key."""
    native = (llama_cpp.llama_model_kv_override * (len(overrides) + 1))()
    for each, (key, value) in zip(native, overrides.items(), strict=False):
        each.key = key.encode()
        if isinstance(value, bool):
            each.tag, each.value.val_bool = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int):
            each.tag, each.value.val_i64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            each.tag, each.value.val_f64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        elif isinstance(value, str):
            text = value.encode()
            if len(text) > _TEXT_BYTES:
                raise ValueError(f"{key} in kv_overrides is longer than {_TEXT_BYTES} bytes")
            each.tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
            ctypes.memmove(
                ctypes.addressof(each.value), text.ljust(_TEXT_BYTES, b"\0"), _TEXT_BYTES
            )
        else:
            raise ValueError(
                f"kv_overrides does not support {key}={value!r}: give a number or a text"
            )
    return native
