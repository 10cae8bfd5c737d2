"""The arguments of `llama_cpp.Llama`, checked before llama.cpp sees them: it ends the process."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import llama_cpp

from ..errors import SettingsError

# Programs may put our class in the place of this one.
StockLlama = llama_cpp.Llama

# Types of the KV cache by the name users know them by, as ggml type numbers.
KV_TYPES: dict[str, int] = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
# llama.cpp's other ones, with which its own ops attend.
_OTHER_KV_TYPES: dict[str, int] = {
    "bf16": 30,  # ggml.h; llama_cpp has no name for it
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
}

# GGML_MAX_N_THREADS: with many more, a system that starts no further ones fails amid a batch.
_MOST_THREADS = 512

# Arguments that llama_cpp's class had once, and passes over now. Programs still give them.
_FORMER = ("n_parts", "n_gqa", "rms_norm_eps", "f16_kv", "mul_mat_q", "low_vram")


def check_arguments(given: Mapping[str, Any], *, own: Collection[str]) -> None:
    """Refuse arguments that there are none of, and values that make no sense.

    Args:
        given: what was given for the parent's arguments.
        own: names of the other arguments there are.

    Raises:
        SettingsError: naming the argument, and what to give.
    """
    _check_names(given, own)
    for name in ("n_batch", "n_ubatch"):
        _check_count(name, given.get(name, 1), least=1, cure="give 1 or more tokens")
    for name in ("n_threads", "n_threads_batch"):
        cure = f"give 1 to {_MOST_THREADS}, or None for one for each physical core"
        _check_count(name, given.get(name) or 0, least=0, most=_MOST_THREADS, cure=cure)
    _check_count("n_ctx", given.get("n_ctx", 0), least=0, cure="give 0 for the model's own")
    for name in ("rope_freq_base", "rope_freq_scale"):
        _check_number(name, given.get(name, 0.0), least=0.0)
    for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
        _check_number(name, given.get(name, 0.0), least=-math.inf)
    for name in ("type_k", "type_v"):
        _check_type(name, given.get(name), {**KV_TYPES, **_OTHER_KV_TYPES})


def _check_names(given: Iterable[str], own: Collection[str]) -> None:
    parents = inspect.signature(StockLlama.__init__).parameters
    known = {*own, *parents, *_FORMER} - {"self", "kwargs"}
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise SettingsError(f"there is no argument {name}: did you mean {nearest[0]}?")


def _check_count(name: str, value: Any, *, least: int, cure: str, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingsError(f"{name} is {value!r}: {cure}")


def _check_number(name: str, value: Any, *, least: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        raise SettingsError(f"{name} is {value!r}: give a number, or 0 for the model's own")


def _check_type(name: str, value: Any, types: Mapping[str, int]) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_count and value in types.values()):
        names = ", ".join(f"{number} ({type_name})" for type_name, number in types.items())
        raise SettingsError(f"{name} is {value!r}, which a KV cache cannot have: give {names}")


def stretches_positions(given: Mapping[str, Any]) -> bool:
    """Whether the user scales positions, and so vouches for a window beyond the trained one."""
    unscaled = (
        None,
        llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
        llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    )
    return bool(
        given.get("rope_scaling_type") not in unscaled
        or given.get("rope_freq_base")
        or given.get("rope_freq_scale")
    )
