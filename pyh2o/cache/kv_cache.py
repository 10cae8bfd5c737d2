"""What one text has in the KV cache of a llama.cpp context, whether that evicts or not."""

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

_SEARCHES = "the CPU searches for evicted rows and archives them, which is slow: "
_ON_THE_CPU = {
    lib.LLAMA_H2O_NOTE_HEADS: f"{_SEARCHES}the GPU has no kernel for the heads of this model",
    lib.LLAMA_H2O_NOTE_PINNED: f"{_SEARCHES}no more memory can be pinned for the GPU, a quarter of "
    "this machine's at most: lower recall_mib (--recall-mib)",
    lib.LLAMA_H2O_NOTE_CODES: "the CPU searches for evicted rows, which is slow: the GPU has no "
    "memory for their codes: lower hh (--hh), recent (--recent) or n_gpu_layers (--gpu-layers)",
    lib.LLAMA_H2O_NOTE_ARCHIVING: "the CPU archives rows, which is slow: the GPU has kernels for "
    "rows of type f32, f16, q8_0 and q4_0, with flash attention",
    lib.LLAMA_H2O_NOTE_CHOICE: "the CPU chooses the rows that a compaction keeps, which is slow: "
    "the GPU cannot move rows, or parts of the text have fair shares (--fair-turns)",
}

MISFIT = "the state does not fit: it is damaged, or of another model or other settings"


class KVCache:
    """The cells and rows of one sequence of a context, which must outlive this.

    Whoever calls has the right to use the context (see `Text.lock`). Where nothing is evicted,
    what keeps rows from that does nothing.

    Args:
        context_address: of the `llama_context`.
        seq_id: the sequence.
        limits: the budget that `attach` returned, or the window of a full cache.
        evicting: whether rows are evicted.

    Attributes:
        limits, evicting: as given.
        position_limit: most tokens of a text.
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
        self._makes_room = False  # the larger cache is needed now
        self.position_limit: int = self.counters().pos_limit if evicting else limits.window

    # ---------------------------------------------------------------------------------------------
    # What is there
    # ---------------------------------------------------------------------------------------------

    def counters(self) -> Any:
        """struct llama_h2o_stats; all 0 for a kind of cache that has none."""
        stats = ffi.new("struct llama_h2o_stats *")
        status = lib.llama_h2o_get_stats(*self._text, stats)
        if not is_unknown_cache(status):
            check(status)
        return stats

    def statistics(self, n_tokens: int) -> KVStatistics:
        """What the cache holds of a text of so many tokens, and what it costs."""
        return statistics_of(
            self.counters(), self.limits, n_tokens, self.position_limit, evicting=self.evicting
        )

    def rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Positions and scores of one layer's rows (see `Llama.kv_rows`); empty without a cache.

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
        n_head_kv = check(lib.llama_h2o_get_rows(*self._text, layer, 0, ffi.NULL, ffi.NULL))
        positions = np.empty((n_head_kv, n_used), dtype=np.int32)
        scores = np.empty((n_head_kv, n_used), dtype=np.float32)
        if positions.size:
            pointers = ffi.from_buffer("int32_t[]", positions), ffi.from_buffer("float[]", scores)
            check(lib.llama_h2o_get_rows(*self._text, layer, n_used, *pointers))
        order = np.argsort(positions, axis=1)
        return np.take_along_axis(positions, order, 1), np.take_along_axis(scores, order, 1)

    def found(self, n_tokens: int) -> WeightArray:
        """How much tokens looked at rows that they found, by the positions of these; [n_tokens].

        Squared shares of attention, added up over the tokens decoded since `forget_found`, layers
        and query heads.
        """
        weights = np.zeros(n_tokens)
        if n_tokens and self.limits.recall:
            pointer = ffi.from_buffer("double[]", weights)
            check(lib.llama_h2o_get_found(*self._text, 0, n_tokens, pointer))
        return weights

    def forget_found(self) -> None:
        """Begin anew to note what is found."""
        if self.limits.recall:
            check(lib.llama_h2o_forget_found(*self._text))

    # ---------------------------------------------------------------------------------------------
    # What stays
    # ---------------------------------------------------------------------------------------------

    def pin(self, n_tokens: int) -> None:
        """Never evict the first tokens (see `Llama.pin`)."""
        cure = "give a count of 0 or more"
        n_tokens = check_count("the number of tokens to pin", n_tokens, least=0, cure=cure)
        if self.evicting:
            self._keep(f"{n_tokens} tokens to pin", lib.llama_h2o_pin, n_tokens)

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Never evict these tokens either (see `Llama.pin_spans`)."""
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
            self._keep("tokens to forget", lib.llama_h2o_forget, native, len(spans))

    def dropped_spans(self) -> list[tuple[int, int]]:
        """Return the dropped spans, ascending and not adjacent."""
        if not self.evicting:
            return []
        n = check(lib.llama_h2o_get_forgotten(*self._text, ffi.NULL, 0))
        spans = ffi.new("struct llama_h2o_span[]", n)
        check(lib.llama_h2o_get_forgotten(*self._text, spans, n))
        return [(span.p0, span.p1) for span in spans]

    def _keep(self, what: str, function: Callable[..., int], *args: Any) -> None:
        """Say what the native library refuses to keep, and what would help."""
        try:
            check(function(*self._text, *args))
        except NativeError as error:
            if error.code != lib.LLAMA_H2O_ERR_PIN:
                raise SettingsError(f"{what}: {error}") from error
            room = self.limits.rows - self.limits.recent
            raise SettingsError(
                f"{what} do not fit the {room} rows that are not recent: raise hh (--hh), or pin "
                "fewer"
            ) from error

    # ---------------------------------------------------------------------------------------------
    # Going on
    # ---------------------------------------------------------------------------------------------

    def check_positions(self, n_tokens: int) -> None:
        """Refuse a text of so many tokens if there are not so many positions.

        Raises:
            ContextLimitError: there are not.
        """
        if n_tokens <= self.position_limit:
            return
        if self.evicting:
            raise ContextLimitError(
                f"{n_tokens} tokens need more than the {self.position_limit} positions this model "
                "can use: shorten the text, or use a model with a longer context"
            )
        # llama.cpp allocates whole blocks of cells, and would go on in the rest of the last one
        raise ContextLimitError(
            f"{n_tokens} tokens are more than the window of {self.position_limit}: shorten "
            "the text, raise n_ctx (--ctx), or turn eviction on"
        )

    def room(self, n_tokens: int, n_batch: int) -> int:
        """Tokens that the next evaluation takes at once; 0 if a compaction comes first.

        Evaluations end where the cache is exactly full, and every `n_batch` tokens from the start
        of the text, or from the last time when it was full. So they are the same, and so are
        compactions, whatever pieces a text is read in.

        Args:
            n_tokens: tokens of the text in the cache.
            n_batch: most tokens at once.
        """
        if not self.evicting:
            return n_batch
        n_used: int = self.counters().n_used
        # before the first compaction every token has a cell
        n_since = n_tokens if n_used == n_tokens else n_used - self.limits.rows
        return min(n_batch - n_since % n_batch, self.limits.capacity - n_used)

    def chunk(self, n_tokens: int, n_left: int, n_batch: int) -> int:
        """How many of the tokens that are left to evaluate, at least one, are next (see `room`)."""
        if not self.evicting or min(n_left, n_batch) == 1:
            return min(n_left, n_batch)
        if self._enlarged:
            return min(n_left, n_batch - n_tokens % n_batch)
        return min(n_left, self.room(n_tokens, n_batch) or min(n_batch, self.limits.slack))

    @contextlib.contextmanager
    def making_room(self, n_new: int) -> Iterator[None]:
        """As many cells as so many new tokens need, for a while, if the prefill is exact.

        Raises:
            SettingsError: they need more memory than they may take or than there is, or more
                positions than the model was trained on.
        """
        if self._enlarged and not self._makes_room:
            self.shrink()  # which failed before
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
        """Have cells for so many rows, unless that is refused."""
        # a small slack may leave cells unused, but a larger cache has more of them in any case
        n_cells = whole_blocks(max(n_rows, self.limits.cells + 1))
        counters = self.counters()
        n_bytes: int = counters.size_k + counters.size_v + counters.size_scores
        n_bytes = n_bytes // counters.n_cells * n_cells
        most = self.limits.settings.prefill_mib
        wrong = None
        if most is not None and n_bytes > most * 2**20:
            wrong = f"more than the {most} that prefill_mib (--prefill-mib) allows"
        elif n_rows > self.limits.n_pos:
            wrong = (
                f"for {n_rows} rows, more than the {self.limits.n_pos} positions the model was "
                "trained on"
            )
        else:
            try:
                self.enlarge(n_cells)
            except NativeError as error:
                wrong = f"which cannot be had: {error}"
        if wrong is not None:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {mib(n_bytes)} MiB, {wrong}; use "
                "prefill='stream' (--prefill stream)"
            )

    def enlarge(self, n_cells: int) -> None:
        """Have at least so many cells for a while, and evict nothing.

        Raises:
            NativeError: out of memory; everything is as it was.
        """
        check(lib.llama_h2o_enlarge(self._text[0], n_cells))
        self._enlarged = True

    def shrink(self) -> None:
        """Go back to the cells there were, with a compaction if the rows do not fit.

        Raises:
            NativeError: that failed, and the text is still in the larger cache.
        """
        check(lib.llama_h2o_shrink(self._text[0]))
        self._enlarged = False

    # ---------------------------------------------------------------------------------------------
    # Going back
    # ---------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Remember what the policy has collected at the present end of the text.

        Removing the tail down to exactly a mark restores it: the text goes on bit for bit as if the
        tail had never been there. A few marks are kept. Compactions, re-bases, clearing, loading a
        state and `enlarge` drop them, removing a tail those behind it.

        Raises:
            NativeError: out of memory.
        """
        if self.evicting:
            check(lib.llama_h2o_mark(*self._text))

    def marked(self, n_tokens: int) -> int:
        """The longest beginning of the text of up to so many tokens that is marked; 0 for none."""
        return check(lib.llama_h2o_marked(*self._text, n_tokens))

    def reusable_prefix(self, n_common: int, n_tokens: int) -> int:
        """How long a prefix has to become for another text to go on from it exactly.

        Args:
            n_common: tokens that both texts begin with.
            n_tokens: tokens of the text in the cache.
        """
        if not self.evicting or n_common == n_tokens:
            return n_tokens  # a full cache loses its tail when the text goes on
        # Elsewhere than at a mark the removed tokens' attention would stay in the scores.
        return self.marked(n_common)

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Whether all rows of a shorter text are still there, and it does not end amid a gap."""
        return not self.evicting or (
            n_tokens >= self.counters().pos_removable
            and not any(start < n_tokens <= end for start, end in self.dropped_spans())
        )

    def remove_tail(self, n_tokens: int) -> bool:
        """Remove the rows of all tokens behind the first so many; whether that was possible."""
        memory = llama_cpp.llama_get_memory(self._address)
        return bool(llama_cpp.llama_memory_seq_rm(memory, self._seq_id, n_tokens, -1))

    def clear(self, *, alone: bool, zero: bool) -> None:
        """Remove all rows.

        Args:
            alone: whether the context has no other sequence.
            zero: set them to zero: some of them were no numbers.
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
        """All that the cache holds of the text (see `Text.kv_state`), after this header.

        Raises:
            StateError: llama.cpp failed.
        """
        size = llama_cpp.llama_state_seq_get_size(self._address, self._seq_id)
        if size:
            try:
                data = mmap(-1, len(header) + size)
            except OSError as error:
                raise MemoryError(f"no {size:,} bytes of memory for a state") from error
            data[: len(header)] = header
            target = (ctypes.c_uint8 * size).from_buffer(data, len(header))
            n = llama_cpp.llama_state_seq_get_data(self._address, target, size, self._seq_id)
            if n == size:
                return data
        raise StateError("llama.cpp could not save the KV cache: verbose=True shows its log")

    def load_state(self, data: bytes | mmap, n_tokens: int, n_header: int = 0) -> None:
        """Put back what `state` returned, of a text of so many tokens, into an empty sequence.

        The header takes `n_header` bytes.

        Raises:
            StateError: it does not fit the model, its settings or the text.
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
        """Have the archive in a file from now on, which is made if there is none.

        Args:
            path: what is in it is written over, unless a state that is loaded next needs it.
            text: says which text it is of; 16 bytes.

        Raises:
            NativeError: it cannot be used, or is of another text, type or model; the archive stays
                where it was.
        """
        name = ffi.new("char[]", os.fsencode(path))
        text_id = ffi.from_buffer("uint8_t[]", text)
        self._check_archive(lib.llama_h2o_archive_open(*self._text, name, text_id))

    def close_archive(self) -> None:
        """Have an empty archive in memory; a file stays as it is."""
        check(lib.llama_h2o_archive_close(*self._text))

    def flush_archive(self) -> None:
        """Let what was written to the file survive a power cut.

        Raises:
            NativeError: not all of it could be written.
        """
        self._check_archive(lib.llama_h2o_archive_flush(*self._text))

    def archive_in_states(self, whole: bool) -> None:
        """Whether states hold all of the archive, or only what its file does not have."""
        check(lib.llama_h2o_archive_in_states(*self._text, whole))

    def archive_trouble(self) -> str:
        """What is wrong with the archive, in one line; "" if nothing is."""
        trouble: bytes = ffi.string(lib.llama_h2o_archive_trouble(*self._text))
        return trouble.decode(errors="replace")

    def notes(self) -> list[str]:
        """What the user should know, each in one line that `notes` has not returned before."""
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
            raise NativeError(status, self.archive_trouble())
        check(status)
