"""What the native library says of a model and of a context, and letting a context evict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .._native import ffi, lib
from ..errors import NativeError, SettingsError, UnsupportedModelError
from ..policies import Streaming
from ..system.memory import total_bytes
from .scoring import scorer_of, take_error
from .settings import UNLIMITED_MIB, Budget, EvictionSettings

MAX_POSITIONS: int = lib.LLAMA_H2O_MOST_POSITIONS


def refusal(status: int) -> str:
    """What a native function refuses that returned this status, in words."""
    return str(ffi.string(lib.llama_h2o_strerror(status)).decode())


def check(status: int) -> int:
    """The count that a native function returned.

    Raises:
        NativeError: its refusal.
        BaseException: what the policy has raised at a compaction.
    """
    if status < 0:
        raise take_error() or NativeError(status, refusal(status))
    return status


# -------------------------------------------------------------------------------------------------
# A loaded model, before a context takes memory for it
# -------------------------------------------------------------------------------------------------


def check_model(model_address: int) -> None:
    """Refuse a loaded model whose rows cannot be evicted.

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
    status = lib.llama_h2o_supports(_model(model_address))
    return None if status == lib.LLAMA_H2O_OK else refusal(status)


def learned_positions(model_address: int) -> int | None:
    """How many positions a loaded model has learned embeddings for; None if it computes them."""
    return lib.llama_h2o_n_pos_learned(_model(model_address)) or None


def rotary_positions(model_address: int, window: int) -> int:
    """Positions that rotary embeddings may use (see llama_h2o_n_pos in llama-h2o.h)."""
    return int(lib.llama_h2o_n_pos(_model(model_address), window))


def least_cell_bytes(model_address: int, type_k: int, type_v: int, *, offload: bool) -> int:
    """Bytes of the host's memory that a cell of a context takes, at least.

    Args:
        model_address: of a loaded model.
        type_k, type_v: ggml types of the rows.
        offload: whether the rows of layers on a device lie there, too.

    Returns:
        0 for a model without a KV cache.
    """
    return int(lib.llama_h2o_size_of_cell(_model(model_address), type_k, type_v, offload))


def _model(address: int) -> Any:
    return ffi.cast("struct llama_model *", address)


# -------------------------------------------------------------------------------------------------
# A context
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """What one layer of a model keeps of a text (struct llama_h2o_layer_info in llama-h2o.h).

    Attributes:
        number: from 0.
        rows_of: the layer whose rows it uses, as a rule its own; None if it has none.
        window: tokens that it sees of the text; None for all of them.
        chunked: whether they are those of its own chunk of the text, of `window` tokens.
        recurrent: whether it keeps a state of fixed size, in the place of rows or beside them.
        kv_heads, head_size_k, head_size_v: of the rows; 0 without any.
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
        """Whether it has rows of its own for all of the text: those that can be evicted."""
        return self.rows_of == self.number and self.window is None


def layer_of(context_address: int, number: int) -> Layer | None:
    """What a layer keeps in a context's memory, which need not evict.

    Returns:
        None if there is no memory, or it is of a kind that is not known.

    Raises:
        NativeError: no such layer.
    """
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
    """Whether a native function says that there is no cache, or of a kind that has no counters."""
    return status in (lib.LLAMA_H2O_ERR_CACHE_KIND, lib.LLAMA_H2O_ERR_NO_CACHE)


def few_tokens(context_address: int) -> int:
    """Most tokens that are attended to one query at a time, which rounds otherwise than more.

    Returns:
        0 where it makes no difference: ggml's ops attend in all layers.
    """
    n: int = lib.llama_h2o_n_few(context_of(context_address))
    return 0 if n == lib.LLAMA_H2O_ERR_NOT_ATTACHED else check(n)


def device_bytes(context_address: int) -> int:
    """Memory of servers and GPUs that the context takes: weights, caches and work space."""
    return check(lib.llama_h2o_device_bytes(context_of(context_address)))


def context_of(address: int) -> Any:
    """The context at an address, for the functions of the library."""
    return ffi.cast("struct llama_context *", address)


def attach(context_address: int, budget: Budget) -> Budget:
    """Let a context without text evict down to a budget, in all of its sequences.

    Args:
        context_address: of the `llama_context`.
        budget: what to keep. Where a head's row is not whole blocks of the archive's usual type,
            the archive is of f16, and where nothing can be found in it there is none by default.

    Returns:
        the budget that it has now.

    Raises:
        SettingsError: the context, the model or the cache type does not allow it.
    """
    settings = budget.settings
    context = context_of(context_address)
    policy = ffi.new("char[]", budget.policy.full_text.encode())
    scorer = scorer_of(budget.policy, budget.recent, context)
    # the native library has copies of both afterwards
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
    """Have a full cache without text count positions as one that evicts does (M-RoPE).

    Args:
        context_address: of the `llama_context`.
        window: most tokens of a text.
        n_batch: tokens at once.

    Raises:
        SettingsError: the model does not allow it.
    """
    slack = min(n_batch, window - 1)
    settings = EvictionSettings(policy=Streaming(), recall=0, attention="ops")
    attach(
        context_address,
        Budget(settings, window, heavy=window - slack - 1, recent=1, slack=slack, n_pos=window),
    )


def _params(budget: Budget, policy: Any, scorer: Any) -> Any:
    """struct llama_h2o_params.

    Args:
        budget: the other settings.
        policy: char[], which must outlive the struct.
        scorer: so must this struct llama_h2o_scorer *; NULL for a policy of the library.
    """
    settings = budget.settings
    values = {
        "heavy": budget.heavy,
        "recent": budget.recent,
        "pinned": budget.pinned,
        "slack": budget.slack,
        "n_pos": budget.n_pos,
        "recall": budget.recall,
        "archive_size": min(settings.recall_mib or 0, UNLIMITED_MIB) * 2**20,
        "pinned_size": total_bytes() // 4,
        "archive_type": getattr(lib, f"LLAMA_H2O_ARCHIVE_{settings.recall_type.upper()}"),
        "positions": getattr(lib, f"LLAMA_H2O_POSITIONS_{settings.positions.upper()}"),
        "attention": getattr(lib, f"LLAMA_H2O_ATTENTION_{settings.attention.upper()}"),
        # no batch has more queries
        "score_every": min(settings.score_every, 2**31),
        "policy": policy,
        "scorer": scorer,
    }
    return ffi.new("struct llama_h2o_params *", values)[0]
