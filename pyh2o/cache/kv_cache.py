"""The KV cache of one sequence of a llama.cpp context, with eviction or without."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .._native import ffi, lib
from ..errors import ContextLimitError, NativeError, SettingsError, StateError
from ..system.integers import check_count
from .native import check, context_of, is_unknown_cache
from .settings import Budget, whole_blocks
from .statistics import KVStatistics, mib, statistics_of

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
WeightArray = npt.NDArray[np.float64]

_SEARCHES = "the CPU archives rows and searches the archive, which is slow: "
_ON_THE_CPU = {
    lib.LLAMA_H2O_NOTE_HEADS: f"{_SEARCHES}the GPU has no kernel for the heads of this model",
    lib.LLAMA_H2O_NOTE_PINNED: f"{_SEARCHES}the pinned memory for the GPU has reached its limit, a "
    "quarter of this machine's memory: lower recall_mib (--recall-mib)",
    lib.LLAMA_H2O_NOTE_CODES: "the CPU searches the archive, which is slow: the GPU is out of "
    "memory for the codes: lower hh (--hh), recent (--recent) or n_gpu_layers (--gpu-layers)",
    lib.LLAMA_H2O_NOTE_ARCHIVING: "the CPU archives rows, which is slow: the GPU supports rows of "
    "type f32, f16, q8_0 and q4_0, with flash attention",
    lib.LLAMA_H2O_NOTE_CHOICE: "the CPU selects the rows that a compaction keeps, which is slow: "
    "the GPU cannot move rows, or parts of the text have fair shares (--fair-turns)",
}

MISFIT = "the state does not fit: it is damaged, or from another model or other settings"


class KVCache:
    """The cells and rows of one sequence of a context, which must outlive this object.

    Callers hold the lock of the context (see `Text.lock`). Without eviction, pinning does nothing.

    Args:
        context_address: address of the `llama_context`.
        seq_id: the sequence.
        limits: the budget that `attach` returned, or the window of a full cache.
        evicting: whether rows are evicted.

    Attributes:
        position_limit: maximum number of tokens of a text.
    """

    def __init__(
        self, context_address: int, seq_id: int, limits: Budget, *, evicting: bool
    ) -> None:
        self.limits = limits
        self.evicting = evicting
        self._address = context_address
        self._seq_id = seq_id
        self._text = (context_of(context_address), seq_id)
        self._noted = 0  # bits of llama_h2o_note
        self._enlarged = False
        self._makes_room = False  # inside `making_room`
        self.position_limit: int = self.counters().pos_limit if evicting else limits.window

    # ---------------------------------------------------------------------------------------------
    # Contents
    # ---------------------------------------------------------------------------------------------

    def counters(self) -> Any:
        """Return a struct llama_h2o_stats; all 0 for a kind of cache without counters."""
        stats = ffi.new("struct llama_h2o_stats *")
        status = lib.llama_h2o_get_stats(*self._text, stats)
        if not is_unknown_cache(status):
            check(status)
        return stats

    def statistics(self, n_tokens: int) -> KVStatistics:
        """Return the statistics of the cache for a text of `n_tokens` tokens."""
        return statistics_of(
            self.counters(), self.limits, n_tokens, self.position_limit, evicting=self.evicting
        )

    def rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Return positions and scores of a layer's rows (see `Llama.kv_rows`).

        Raises:
            NativeError: no such layer, or eviction is not attached.
        """
        counters = self.counters()
        n_used, n_layer = counters.n_used, counters.n_layer
        if n_layer and not 0 <= layer < n_layer:
            raise NativeError(
                lib.LLAMA_H2O_ERR_ARGUMENT,
                f"layer {layer} is out of range (0 to {n_layer - 1})",
            )
        n_head_kv = check(lib.llama_h2o_get_rows(*self._text, layer, 0, ffi.NULL, ffi.NULL))
        positions = np.empty((n_head_kv, n_used), dtype=np.int32)
        scores = np.empty((n_head_kv, n_used), dtype=np.float32)
        if positions.size:
            pointers = ffi.from_buffer("int32_t[]", positions), ffi.from_buffer("float[]", scores)
            check(lib.llama_h2o_get_rows(*self._text, layer, n_used, *pointers))
        order = np.argsort(positions, axis=1)
        return np.take_along_axis(positions, order, 1), np.take_along_axis(scores, order, 1)

    def found(self, n_tokens: int) -> WeightArray:
        """Return the attention to retrieved rows by their positions; [n_tokens].

        It is the sum of squared attention weights over layers, query heads and the tokens decoded
        since `reset_found`.
        """
        weights = np.zeros(n_tokens)
        if n_tokens and self.limits.recall:
            pointer = ffi.from_buffer("double[]", weights)
            check(lib.llama_h2o_get_found(*self._text, 0, n_tokens, pointer))
        return weights

    def reset_found(self) -> None:
        """Reset the counters of `found`."""
        if self.limits.recall:
            check(lib.llama_h2o_forget_found(*self._text))

    # ---------------------------------------------------------------------------------------------
    # Pinning and dropping
    # ---------------------------------------------------------------------------------------------

    def pin(self, n_tokens: int) -> None:
        """Pin the first tokens (see `Llama.pin`)."""
        cure = "give a count of 0 or more"
        n_tokens = check_count("the number of tokens to pin", n_tokens, least=0, cure=cure)
        if self.evicting:
            self._keep(f"{n_tokens} tokens to pin", lib.llama_h2o_pin, n_tokens)

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Pin spans too (see `Llama.pin_spans`)."""
        if self.evicting:
            n_tokens = sum(max(0, end - start) for start, end in spans)
            native = ffi.new("struct llama_h2o_span[]", list(spans))
            what = f"spans of {n_tokens} tokens to pin"
            self._keep(what, lib.llama_h2o_pin_spans, native, len(spans))

    def share_fairly(self, starts: Sequence[int]) -> None:
        """Give each part of the text its share of the heavy rows (see `Llama.share_fairly`)."""
        if self.evicting:
            native = ffi.new("int32_t[]", list(starts))
            what = "starts of parts of the text"
            self._keep(what, lib.llama_h2o_share_fairly, native, len(starts))

    def drop_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Drop spans (see `Text.drop_spans`)."""
        if self.evicting:
            native = ffi.new("struct llama_h2o_span[]", list(spans))
            self._keep("spans to drop", lib.llama_h2o_forget, native, len(spans))

    def dropped_spans(self) -> list[tuple[int, int]]:
        """Return the dropped spans, ascending and not adjacent."""
        if not self.evicting:
            return []
        n = check(lib.llama_h2o_get_forgotten(*self._text, ffi.NULL, 0))
        spans = ffi.new("struct llama_h2o_span[]", n)
        check(lib.llama_h2o_get_forgotten(*self._text, spans, n))
        return [(span.p0, span.p1) for span in spans]

    def _keep(self, what: str, function: Callable[..., int], *args: Any) -> None:
        """Call a native function, and turn its errors into a SettingsError about `what`."""
        try:
            check(function(*self._text, *args))
        except NativeError as error:
            if error.code != lib.LLAMA_H2O_ERR_PIN:
                raise SettingsError(f"{what}: {error}") from error
            room = self.limits.rows - self.limits.recent
            raise SettingsError(
                f"{what} do not fit the {room} rows that are not recent: raise hh (--hh), or pin "
                "fewer tokens"
            ) from error

    # ---------------------------------------------------------------------------------------------
    # Reading
    # ---------------------------------------------------------------------------------------------

    def check_positions(self, n_tokens: int) -> None:
        """Raise a ContextLimitError if a text has more tokens than `position_limit`."""
        if n_tokens <= self.position_limit:
            return
        if self.evicting:
            raise ContextLimitError(
                f"{n_tokens} tokens need more than the {self.position_limit} positions this model "
                "can use: shorten the text, or use a model with a longer context"
            )
        # llama.cpp allocates whole blocks of cells, so it would accept a few tokens more
        raise ContextLimitError(
            f"{n_tokens} tokens do not fit the window of {self.position_limit}: shorten the text, "
            "raise n_ctx (--ctx), or enable eviction"
        )

    def room(self, n_tokens: int, n_batch: int) -> int:
        """Return the maximum size of the next chunk; 0 if a compaction must come first.

        A chunk ends when the cache is full, and every `n_batch` tokens since it was last full or
        since the start of the text. Chunks and compactions therefore do not depend on how callers
        divide a text.

        Args:
            n_tokens: tokens of the text in the cache.
            n_batch: maximum tokens of a batch.
        """
        if not self.evicting:
            return n_batch
        n_used: int = self.counters().n_used
        # before the first compaction, every token has a cell
        n_since = n_tokens if n_used == n_tokens else n_used - self.limits.rows
        return min(n_batch - n_since % n_batch, self.limits.capacity - n_used)

    def chunk(self, n_tokens: int, n_left: int, n_batch: int) -> int:
        """Return the size of the next chunk of `n_left` tokens, at least 1 (see `room`)."""
        if not self.evicting or min(n_left, n_batch) == 1:
            return min(n_left, n_batch)
        if self._enlarged:
            return min(n_left, n_batch - n_tokens % n_batch)
        return min(n_left, self.room(n_tokens, n_batch) or min(n_batch, self.limits.slack))

    @contextlib.contextmanager
    def making_room(self, n_new: int) -> Iterator[None]:
        """Enlarge the cache inside the block to hold `n_new` more tokens, if prefill is "exact".

        Raises:
            SettingsError: they need more memory than `prefill_mib` or than is free, or more
                positions than the model was trained on.
        """
        if self._enlarged and not self._makes_room:
            self.shrink()  # it failed before
        is_exact = self.evicting and self.limits.settings.prefill == "exact"
        if not is_exact or n_new == 1 or self._enlarged:
            yield
            return
        n_rows = self.counters().n_used + n_new
        if n_rows <= self.limits.capacity:
            yield
            return
        self._make_room(n_new, n_rows)
        self._makes_room = True
        try:
            yield
        finally:
            self._makes_room = False
            self.shrink()

    def _make_room(self, n_new: int, n_rows: int) -> None:
        """Enlarge the cache to `n_rows` rows, or raise a SettingsError."""
        # at least one cell more, even if a small slack leaves cells unused
        n_cells = whole_blocks(max(n_rows, self.limits.cells + 1))
        counters = self.counters()
        n_bytes: int = counters.size_k + counters.size_v + counters.size_scores
        n_bytes = n_bytes // counters.n_cells * n_cells
        most = self.limits.settings.prefill_mib
        problem = None
        if most is not None and n_bytes > most * 2**20:
            problem = f"more than the {most} that prefill_mib (--prefill-mib) allows"
        elif n_rows > self.limits.n_pos:
            problem = (
                f"for {n_rows} rows, more than the {self.limits.n_pos} positions the model was "
                "trained on"
            )
        else:
            try:
                self.enlarge(n_cells)
            except NativeError as error:
                problem = f"and the allocation failed: {error}"
        if problem is not None:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {mib(n_bytes)} MiB, {problem}; use "
                "prefill='stream' (--prefill stream)"
            )

    def enlarge(self, n_cells: int) -> None:
        """Enlarge the cache to at least `n_cells` cells, and evict nothing until `shrink`.

        Raises:
            NativeError: out of memory; nothing is changed.
        """
        check(lib.llama_h2o_enlarge(self._text[0], n_cells))
        self._enlarged = True

    def shrink(self) -> None:
        """Undo `enlarge`, with a compaction if the rows do not fit.

        Raises:
            NativeError: out of memory; the text remains in the larger cache.
        """
        check(lib.llama_h2o_shrink(self._text[0]))
        self._enlarged = False

    # ---------------------------------------------------------------------------------------------
    # Removing a tail
    # ---------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Save the scores at the present end of the text.

        Removing the tail down to exactly a mark restores them, so that the text continues bit for
        bit as if the tail had never existed. The last few marks are kept. Compactions, re-bases,
        clearing, loading a state and `enlarge` delete all marks; removing a tail deletes its marks.

        Raises:
            NativeError: out of memory.
        """
        if self.evicting:
            check(lib.llama_h2o_mark(*self._text))

    def marked(self, n_tokens: int) -> int:
        """Return the last mark within the first `n_tokens` tokens; 0 for none."""
        return check(lib.llama_h2o_marked(*self._text, n_tokens))

    def reusable_prefix(self, n_common: int, n_tokens: int) -> int:
        """Return the length to shorten the text to so that another text can continue it exactly.

        Args:
            n_common: length of the common prefix of both texts.
            n_tokens: tokens of the text in the cache.
        """
        if not self.evicting or n_common == n_tokens:
            return n_tokens  # a full cache drops its tail with the next evaluation
        # Without a mark, the scores would include the attention of removed tokens.
        return self.marked(n_common)

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Return whether the cache has all rows of a shorter text that ends in no dropped span."""
        return not self.evicting or (
            n_tokens >= self.counters().pos_removable
            and not any(start < n_tokens <= end for start, end in self.dropped_spans())
        )

    def remove_tail(self, n_tokens: int) -> bool:
        """Remove the rows after the first `n_tokens` tokens; return False if that is impossible."""
        memory = llama_cpp.llama_get_memory(self._address)
        return bool(llama_cpp.llama_memory_seq_rm(memory, self._seq_id, n_tokens, -1))

    def clear(self, *, alone: bool, zero: bool) -> None:
        """Remove all rows.

        Args:
            alone: whether the context has no other sequence.
            zero: whether to overwrite them with 0, because some are NaN.
        """
        memory = llama_cpp.llama_get_memory(self._address)
        if memory is None:
            return
        if alone:
            llama_cpp.llama_memory_clear(memory, zero)
            return
        llama_cpp.llama_memory_seq_rm(memory, self._seq_id, -1, -1)
        if zero and self.evicting:
            check(lib.llama_h2o_zero_rows(*self._text))

    # ---------------------------------------------------------------------------------------------
    # States
    # ---------------------------------------------------------------------------------------------

    def state(self, header: bytes = b"") -> mmap:
        """Return a header and the state of the cache (see `Text.kv_state`).

        Raises:
            StateError: llama.cpp failed.
        """
        size = llama_cpp.llama_state_seq_get_size(self._address, self._seq_id)
        if size:
            try:
                data = mmap(-1, len(header) + size)
            except OSError as error:
                raise MemoryError(f"out of memory for a state of {size:,} bytes") from error
            data[: len(header)] = header
            target = (ctypes.c_uint8 * size).from_buffer(data, len(header))
            n = llama_cpp.llama_state_seq_get_data(self._address, target, size, self._seq_id)
            if n == size:
                return data
        raise StateError("llama.cpp failed to save the KV cache: see its log with verbose=True")

    def load_state(self, data: bytes | mmap, n_tokens: int, n_header: int = 0) -> None:
        """Load the state of a text of `n_tokens` tokens into an empty sequence.

        Raises:
            StateError: the state does not fit the model, its settings or the text.
        """
        source = np.frombuffer(data, np.uint8, offset=n_header)
        pointer = source.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n = llama_cpp.llama_state_seq_set_data(self._address, pointer, len(source), self._seq_id)
        memory = llama_cpp.llama_get_memory(self._address)
        newest = llama_cpp.llama_memory_seq_pos_max(memory, self._seq_id)
        if n != len(source) or newest != n_tokens - 1:
            raise StateError(MISFIT)

    # ---------------------------------------------------------------------------------------------
    # The archive
    # ---------------------------------------------------------------------------------------------

    def open_archive(self, path: Path, text: bytes) -> None:
        """Store the archive in a file from now on.

        Args:
            path: a file to create, or one whose rows the next loaded state needs. Other rows in it
                are overwritten.
            text: ID of the text, 16 bytes.

        Raises:
            NativeError: the file cannot be used, or is from another text, type or model; the
                archive stays in its present storage.
        """
        name = ffi.new("char[]", os.fsencode(path))
        text_id = ffi.from_buffer("uint8_t[]", text)
        self._check_archive(lib.llama_h2o_archive_open(*self._text, name, text_id))

    def archive_error(self) -> str:
        """Return the error of the archive, in one line; "" for none."""
        error: bytes = ffi.string(lib.llama_h2o_archive_error(*self._text))
        return error.decode(errors="replace")

    def notes(self) -> list[str]:
        """Return new warnings, one line each, for example that the CPU does work for the GPU."""
        if not self.evicting:
            return []
        noted = check(lib.llama_h2o_get_notes(*self._text))
        fresh, self._noted = noted & ~self._noted, self._noted | noted
        lines = [line for note, line in _ON_THE_CPU.items() if fresh & note]
        if fresh & lib.LLAMA_H2O_NOTE_FULL:
            counters = self.counters()
            n, size = int(counters.n_archived), mib(counters.size_archive)
            lines.append(
                f"the archive is full at {n:,} tokens ({size:,} MiB): the oldest tokens can no "
                f"longer be recalled; a text that starts with recall_mib={2 * size} (--recall-mib "
                f"{2 * size}) keeps {2 * n:,}"
            )
        return lines

    def _check_archive(self, status: int) -> None:
        if status == lib.LLAMA_H2O_ERR_ARCHIVE_FILE:
            raise NativeError(status, self.archive_error())
        check(status)
