"""Queries of models and contexts to the native library, and attaching eviction to a context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .._native import ffi, lib
from ..errors import NativeError, SettingsError, UnsupportedModelError
from ..policies import Streaming
from ..system.memory import total_bytes
from .scoring import scorer_of, take_error
from .settings import Budget, EvictionSettings

MAX_POSITIONS: int = lib.LLAMA_H2O_MOST_POSITIONS


def refusal(status: int) -> str:
    """Return the error message of a status."""
    return str(ffi.string(lib.llama_h2o_strerror(status)).decode())


def check(status: int) -> int:
    """Return a count from a native function, or raise its error or that of the policy."""
    if status < 0:
        raise take_error() or NativeError(status, refusal(status))
    return status


# -------------------------------------------------------------------------------------------------
# A loaded model, before a context takes memory for it
# -------------------------------------------------------------------------------------------------


def check_model(model_address: int) -> None:
    """Raise an UnsupportedModelError if the rows of a loaded model cannot be evicted."""
    reason = why_refused(model_address)
    if reason is not None:
        raise UnsupportedModelError(
            f"eviction cannot be used with this model: {reason}; "
            "evict=False (--no-evict) runs it with the full cache"
        )


def why_refused(model_address: int) -> str | None:
    """Return why the rows of a loaded model cannot be evicted; None if they can."""
    status = lib.llama_h2o_supports(_model(model_address))
    return None if status == lib.LLAMA_H2O_OK else refusal(status)


def learned_positions(model_address: int) -> int | None:
    """Return the number of learned position embeddings; None if the model has none."""
    return lib.llama_h2o_n_pos_learned(_model(model_address)) or None


def rotary_positions(model_address: int, window: int) -> int:
    """Return the number of positions for rotary embeddings (see llama_h2o_n_pos)."""
    return int(lib.llama_h2o_n_pos(_model(model_address), window))


def least_cell_bytes(model_address: int, type_k: int, type_v: int, *, offload: bool) -> int:
    """Return a lower bound of the host memory of a cell, in bytes; 0 without a KV cache."""
    return int(lib.llama_h2o_size_of_cell(_model(model_address), type_k, type_v, offload))


def _model(address: int) -> Any:
    return ffi.cast("struct llama_model *", address)


# -------------------------------------------------------------------------------------------------
# A context
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """The cache of one layer (struct llama_h2o_layer_info in llama-h2o.h).

    Attributes:
        rows_of: layer whose rows it uses, usually itself; None without rows.
        window: sliding window, in tokens; None for full attention.
        chunked: whether attention is within chunks of `window` tokens instead.
        recurrent: whether it keeps a state of fixed size, instead of or alongside rows.
        kv_heads, head_size_k, head_size_v: shape of the rows; 0 without rows.
    """

    number: int
    rows_of: int | None
    window: int | None
    chunked: bool
    recurrent: bool
    kv_heads: int
    head_size_k: int
    head_size_v: int

    @property
    def grows(self) -> bool:
        """Whether the number of its own rows grows with the text, so that they can be evicted."""
        return self.rows_of == self.number and self.window is None


def layer_of(context_address: int, number: int) -> Layer | None:
    """Return the cache of a layer, with eviction or without; None for an unknown kind of cache."""
    layer = ffi.new("struct llama_h2o_layer_info *")
    status = lib.llama_h2o_get_layer(context_of(context_address), number, layer)
    if is_unknown_cache(status):
        return None
    check(status)
    return Layer(
        number,
        rows_of=None if layer.rows_of < 0 else layer.rows_of,
        window=layer.window or None,
        chunked=layer.chunked,
        recurrent=layer.recurrent,
        kv_heads=layer.n_head_kv,
        head_size_k=layer.n_embd_head_k,
        head_size_v=layer.n_embd_head_v,
    )


def is_unknown_cache(status: int) -> bool:
    """Return whether a status means that there is no cache, or a kind without counters."""
    return status in (lib.LLAMA_H2O_ERR_CACHE_KIND, lib.LLAMA_H2O_ERR_NO_CACHE)


def few_tokens(context_address: int) -> int:
    """Return the largest batch whose attention is computed query by query; 0 if there is none."""
    n: int = lib.llama_h2o_n_few(context_of(context_address))
    return 0 if n == lib.LLAMA_H2O_ERR_NOT_ATTACHED else check(n)


def device_bytes(context_address: int) -> int:
    """Return the bytes that a context takes on GPUs and RPC servers, with weights and buffers."""
    return check(lib.llama_h2o_device_bytes(context_of(context_address)))


def context_of(address: int) -> Any:
    """Return the context at an address as a native pointer."""
    return ffi.cast("struct llama_context *", address)


def attach(context_address: int, budget: Budget) -> Budget:
    """Attach eviction to an empty context, for all of its sequences.

    Args:
        budget: rows to keep. If head sizes do not fit blocks of the default archive type, the
            archive is f16. If the model does not support recall, the default is no recall.

    Returns:
        the budget with these changes.
    """
    settings = budget.settings
    context = context_of(context_address)
    policy = ffi.new("char[]", budget.policy.full_text.encode())
    scorer = scorer_of(budget.policy, budget.recent, context)
    # the native library copies policy and scorer
    status = lib.llama_h2o_attach(context, _params(budget, policy, scorer))
    usual_type = EvictionSettings.recall_type
    if status == lib.LLAMA_H2O_ERR_ARCHIVE_TYPE and settings.recall_type == usual_type:
        settings = replace(settings, recall_type="f16")
        return attach(context_address, replace(budget, settings=settings))
    if status == lib.LLAMA_H2O_ERR_RECALL_HEADS and settings.recall is None:
        settings = replace(settings, recall=0)
        return attach(context_address, replace(budget, settings=settings, recall=0))
    try:
        check(status)
    except NativeError as error:
        raise SettingsError(f"eviction cannot start: {error}") from error
    return budget


def keep_all(context_address: int, window: int, n_batch: int) -> None:
    """Attach a budget of the whole window, so that M-RoPE positions count as with eviction."""
    slack = min(n_batch, window - 1)
    settings = EvictionSettings(policy=Streaming(), recall=0, attention="ops")
    attach(
        context_address,
        Budget(settings, window, heavy=window - slack - 1, recent=1, slack=slack, n_pos=window),
    )


def _params(budget: Budget, policy: Any, scorer: Any) -> Any:
    """Return a struct llama_h2o_params; `policy` (char[]) and `scorer` must outlive it."""
    settings = budget.settings
    values = {
        "heavy": budget.heavy,
        "recent": budget.recent,
        "pinned": budget.pinned,
        "slack": budget.slack,
        "n_pos": budget.n_pos,
        "recall": budget.recall,
        "archive_size": min((settings.recall_mib or 0) * 2**20, 2**63),
        "pinned_size": total_bytes() // 4,
        "archive_type": getattr(lib, f"LLAMA_H2O_ARCHIVE_{settings.recall_type.upper()}"),
        "attention": getattr(lib, f"LLAMA_H2O_ATTENTION_{settings.attention.upper()}"),
        "policy": policy,
        "scorer": scorer,
    }
    return ffi.new("struct llama_h2o_params *", values)[0]
