"""What the native library says of a loaded model, before a context takes memory for it."""

from __future__ import annotations

from .._native import ffi, lib
from ..errors import UnsupportedModelError
from .kv_cache import refusal


def check_model(model_address: int) -> None:
    """Refuse a loaded model whose rows cannot be evicted, before memory is taken for it.

    Raises:
        UnsupportedModelError: with the reason.
    """
    reason = why_refused(model_address)
    if reason is not None:
        raise UnsupportedModelError(
            f"eviction cannot be used with this model: {reason}; "
            "evict=False (--no-evict) runs it with the full cache"
        )


def why_refused(model_address: int) -> str | None:
    """Why rows of a loaded model cannot be evicted, in one line; None if they can."""
    status = lib.llama_h2o_supports(ffi.cast("struct llama_model *", model_address))
    return None if status == lib.LLAMA_H2O_OK else refusal(status)


def learned_positions(model_address: int) -> int | None:
    """How many positions a loaded model has learned embeddings for; None if it computes them."""
    model = ffi.cast("struct llama_model *", model_address)
    return lib.llama_h2o_n_pos_learned(model) or None


def rotary_positions(model_address: int, window: int) -> int:
    """Positions that rotary embeddings may use (see llama_h2o_n_pos in llama-h2o.h)."""
    return int(lib.llama_h2o_n_pos(ffi.cast("struct llama_model *", model_address), window))


def least_cell_bytes(model_address: int, type_k: int, type_v: int, *, offload: bool) -> int:
    """Bytes of the host's memory that a cell of a context takes, at least.

    Args:
        model_address: of a loaded model.
        type_k, type_v: ggml types of the rows.
        offload: whether the rows of layers on a device lie there, too.

    Returns:
        0 for a model without a KV cache.
    """
    model = ffi.cast("struct llama_model *", model_address)
    return int(lib.llama_h2o_size_of_cell(model, type_k, type_v, offload))
