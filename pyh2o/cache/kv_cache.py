"""A context's KV cache seen from Python: attach eviction, read counters, scores and positions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._native import ffi, lib
from ..errors import NativeError
from .scoring import scorer_of, take_error
from .settings import Budget

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
WeightArray = npt.NDArray[np.float64]

# What the native library answers to more pinned tokens than there is room for.
ERR_PIN: int = lib.LLAMA_H2O_ERR_PIN
ERR_ARCHIVE_TYPE: int = lib.LLAMA_H2O_ERR_ARCHIVE_TYPE
ERR_RECALL_HEADS: int = lib.LLAMA_H2O_ERR_RECALL_HEADS
MOST_POSITIONS: int = lib.LLAMA_H2O_MOST_POSITIONS


@dataclass(frozen=True)
class Counters:
    """The native statistics of one sequence (struct llama_h2o_stats in llama-h2o.h)."""

    n_cells: int = 0
    n_used: int = 0
    n_layer: int = 0
    n_pinned: int = 0
    pos_removable: int = 0
    pos_limit: int = 0
    n_compactions: int = 0
    n_cells_freed: int = 0
    n_rows_evicted: int = 0
    n_rows_moved: int = 0
    n_rebases: int = 0
    t_compactions_us: int = 0
    t_rebases_us: int = 0
    size_k: int = 0
    size_v: int = 0
    size_window: int = 0
    size_recurrent: int = 0
    size_scores: int = 0
    n_archived: int = 0
    n_unarchived: int = 0
    size_archive: int = 0
    t_archive_us: int = 0
    n_looked: int = 0
    found: float = 0.0


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


class KVCache:
    """What one sequence of a llama.cpp context has in its KV cache; the context must outlive this.

    Args:
        context_address: address of the `llama_context`.
        seq_id: the sequence. Eviction is attached to all of them at once.
    """

    def __init__(self, context_address: int, seq_id: int = 0) -> None:
        self._context = ffi.cast("struct llama_context *", context_address)
        self._text = (self._context, seq_id)

    def attach(self, budget: Budget) -> None:
        """Evict down to the budget from now on; the context must be empty.

        Raises:
            NativeError: the context, the model or the cache type does not allow it.
        """
        policy = ffi.new("char[]", budget.policy.full_text.encode())
        scorer = scorer_of(budget.policy, budget.recent, self._context)
        # the native library has copies of both afterwards
        _check(lib.llama_h2o_attach(self._context, _params(budget, policy, scorer)))

    def pin(self, n_pinned: int) -> None:
        """Never evict the first positions of a sequence, until it is cleared.

        Raises:
            NativeError: they are more than the pinned and heavy rows.
        """
        _check(lib.llama_h2o_pin(*self._text, n_pinned))

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Never evict these half-open ranges of positions either, until the sequence is cleared.

        Args:
            spans: ascending and apart; in place of those given before.

        Raises:
            NativeError: they are out of order, or more than the pinned and heavy rows.
        """
        native = ffi.new("struct llama_h2o_span[]", list(spans))
        _check(lib.llama_h2o_pin_spans(*self._text, native, len(spans)))

    def share_fairly(self, starts: Sequence[int]) -> None:
        """Give each segment of the text its share of the heavy rows, until it is cleared.

        Args:
            starts: positions above 0, ascending, where the text is cut; none for one segment.

        Raises:
            NativeError: they are out of order.
        """
        native = ffi.new("int32_t[]", list(starts))
        _check(lib.llama_h2o_share_fairly(*self._text, native, len(starts)))

    def zero_rows(self) -> None:
        """Set the rows to zero, when the text is gone.

        Raises:
            NativeError: it is not.
        """
        _check(lib.llama_h2o_zero_rows(*self._text))

    def mark(self) -> None:
        """Remember what the policy has collected at the present end of the text.

        Removing the tail down to exactly a mark restores it: the text goes on bit for bit as if the
        tail had never been there. A few marks are kept. Compactions, re-bases, clearing, loading a
        state and `enlarge` drop them, removing a tail those behind it.

        Raises:
            NativeError: out of memory, or eviction is not attached.
        """
        _check(lib.llama_h2o_mark(*self._text))

    def marked(self, n_tokens: int) -> int:
        """The longest beginning of the text of up to so many tokens that is marked; 0 for none."""
        return _check(lib.llama_h2o_marked(*self._text, n_tokens))

    def enlarge(self, n_cells: int) -> None:
        """Have at least so many cells for a while, and evict nothing.

        Raises:
            NativeError: out of memory; everything is as it was.
        """
        _check(lib.llama_h2o_enlarge(self._context, n_cells))

    def shrink(self) -> None:
        """Go back to the cells there were, with a compaction if the rows do not fit."""
        _check(lib.llama_h2o_shrink(self._context))

    def found(self, n_tokens: int) -> WeightArray:
        """How much tokens looked at rows that they found, by the positions of these; [n_tokens].

        Squared shares of attention, added up over the tokens decoded since `forget_found`, layers
        and query heads.
        """
        weights = np.zeros(n_tokens)
        if n_tokens:
            pointer = ffi.from_buffer("double[]", weights)
            _check(lib.llama_h2o_get_found(*self._text, 0, n_tokens, pointer))
        return weights

    def forget_found(self) -> None:
        """Begin anew to note what is found."""
        _check(lib.llama_h2o_forget_found(*self._text))

    def open_archive(self, path: Path, text: bytes) -> None:
        """Have the archive in a file from now on, which is made if there is none.

        Args:
            path: what is in it is written over, unless a state that is loaded next needs it.
            text: says which text it is of; 16 bytes.

        Raises:
            NativeError: it cannot be used, or is of another text, type or model; the archive stays
                where it was.
        """
        name = ffi.new("char[]", os.fsencode(path))
        status = lib.llama_h2o_archive_open(*self._text, name, ffi.from_buffer("uint8_t[]", text))
        self._check_archive(status)

    def close_archive(self) -> None:
        """Have an empty archive in memory; a file stays as it is."""
        _check(lib.llama_h2o_archive_close(*self._text))

    def flush_archive(self) -> None:
        """Let what was written to the file survive a power cut.

        Raises:
            NativeError: not all of it could be written.
        """
        self._check_archive(lib.llama_h2o_archive_flush(*self._text))

    def archive_in_states(self, whole: bool) -> None:
        """Whether states hold all of the archive, or only what its file does not have."""
        _check(lib.llama_h2o_archive_in_states(*self._text, whole))

    def archive_trouble(self) -> str:
        """What is wrong with the archive, in one line; "" if nothing is."""
        trouble: bytes = ffi.string(lib.llama_h2o_archive_trouble(*self._text))
        return trouble.decode(errors="replace")

    def _check_archive(self, status: int) -> None:
        if status == lib.LLAMA_H2O_ERR_ARCHIVE_FILE:
            raise NativeError(status, self.archive_trouble())
        _check(status)

    def counters(self) -> Counters:
        """Counters of a sequence; all 0 for a kind of cache that has none."""
        stats = ffi.new("struct llama_h2o_stats *")
        status = lib.llama_h2o_get_stats(*self._text, stats)
        if status in (lib.LLAMA_H2O_ERR_CACHE_KIND, lib.LLAMA_H2O_ERR_NO_CACHE):
            return Counters()
        _check(status)
        return Counters(**{name: getattr(stats, name) for name in Counters.__annotations__})

    def layer(self, number: int) -> Layer | None:
        """What a layer keeps in this context's memory, which needs no eviction.

        Returns:
            None if there is no memory, or it is of a kind that is not known.

        Raises:
            NativeError: no such layer.
        """
        layer = ffi.new("struct llama_h2o_layer_info *")
        status = lib.llama_h2o_get_layer(self._context, number, layer)
        if status in (lib.LLAMA_H2O_ERR_CACHE_KIND, lib.LLAMA_H2O_ERR_NO_CACHE):
            return None
        _check(status)
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

    def few_tokens(self) -> int:
        """Most tokens that are attended to one query at a time, which rounds otherwise than more.

        Returns:
            0 where it makes no difference: ggml's ops attend in all layers.
        """
        n: int = lib.llama_h2o_n_few(self._context)
        return 0 if n == lib.LLAMA_H2O_ERR_NOT_ATTACHED else _check(n)

    def device_bytes(self) -> int:
        """Memory of GPUs that the context takes: weights, caches and work space."""
        return _check(lib.llama_h2o_device_bytes(self._context))

    def rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Token positions and scores of the rows one layer holds, in the order of the text.

        Returns:
            positions [n_head_kv, n_used] ascending for each head, and scores of the same shape;
            both empty for a layer without a KV cache.

        Raises:
            NativeError: no such layer, which the message names, or eviction is not attached.
        """
        counters = self.counters()
        n_used, n_layer = counters.n_used, counters.n_layer
        if n_layer and not 0 <= layer < n_layer:
            raise NativeError(
                lib.LLAMA_H2O_ERR_ARGUMENT,
                f"there is no layer {layer}: give one of the {n_layer}, from 0 to {n_layer - 1}",
            )
        n_head_kv = self._get_rows(layer, 0, ffi.NULL, ffi.NULL)
        positions = np.empty((n_head_kv, n_used), dtype=np.int32)
        scores = np.empty((n_head_kv, n_used), dtype=np.float32)
        if positions.size:
            pointers = (
                ffi.from_buffer("int32_t[]", positions),
                ffi.from_buffer("float[]", scores),
            )
            self._get_rows(layer, n_used, *pointers)
        order = np.argsort(positions, axis=1)
        return np.take_along_axis(positions, order, 1), np.take_along_axis(scores, order, 1)

    def _get_rows(self, layer: int, n_rows: int, pos: Any, score: Any) -> int:
        return _check(lib.llama_h2o_get_rows(*self._text, layer, n_rows, pos, score))


def _params(budget: Budget, policy: Any, scorer: Any) -> Any:
    """struct llama_h2o_params.

    Args:
        budget: the other settings.
        policy: char[], which must outlive the struct.
        scorer: so must this struct llama_h2o_scorer *; NULL for a policy of the library.
    """
    settings = budget.settings
    schemes = {
        "original": lib.LLAMA_H2O_POSITIONS_ORIGINAL,
        "dense": lib.LLAMA_H2O_POSITIONS_DENSE,
    }
    values = {
        "heavy": budget.heavy,
        "recent": budget.recent,
        "pinned": budget.pinned,
        "slack": budget.slack,
        "n_pos": budget.n_pos,
        "recall": budget.recall,
        # more than there are addresses for is as much as it needs
        "archive_size": min((settings.recall_mib or 0) * 2**20, 2**63),
        "archive_type": getattr(lib, f"LLAMA_H2O_ARCHIVE_{settings.recall_type.upper()}"),
        "positions": schemes[settings.positions],
        "attention": getattr(lib, f"LLAMA_H2O_ATTENTION_{settings.attention.upper()}"),
        "policy": policy,
        "scorer": scorer,
    }
    return ffi.new("struct llama_h2o_params *", values)[0]


def refusal(status: int) -> str:
    """What a native function refuses, in words.

    Args:
        status: that it returned.
    """
    return str(ffi.string(lib.llama_h2o_strerror(status)).decode())


def _check(status: int) -> int:
    """The count that a native function returned.

    Raises:
        NativeError: its refusal.
        BaseException: what the policy has raised at a compaction.
    """
    if status < 0:
        raise take_error() or NativeError(status, refusal(status))
    return status
