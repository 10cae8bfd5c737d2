"""Evaluation of the tokens of a text, chunk by chunk, and its logits."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache.archive_file import ArchiveFile
from ..cache.kv_cache import KVCache
from ..errors import DecodeError, EvictedError, StateError
from .batcher import Job
from .locks import TextLock
from .model import Model
from .projector import ENDS, WITHIN, is_of_picture, n_of_a_kind, n_of_picture

# Initial capacity of the token record.
FIRST_RECORD = 4096


class EvaluatedText:
    """The tokens of one sequence of a model, and the logits after them.

    Args:
        model: the model, which must stay open.
        seq_id: sequence of the context.
        archive: file for the archive; None for memory.
        keeps_logits: whether to keep the logits of all tokens.

    Raises:
        SettingsError: the archive's file cannot be used.

    Attributes:
        lock: to hold while native memory is used, including that of `cache`.
        n_tokens: length of the text; setting it to a smaller value truncates the text.
        record: the tokens of the text are its first `n_tokens` elements.
        logits: of the last evaluation; [n_outputs, n_vocab].
        all_logits: of all tokens, if they are kept; [at least n_tokens, n_vocab].
        archive: storage of the archive; None without recall.
        position_limit: maximum length of the text; 2**31 - 2**20 if positions are re-based.
        priority: texts of higher priority read their prompts first.
        n_sampled: number of tokens sampled in this sequence so far, in earlier texts too.
        pauses: callbacks by token count: each is called when this many tokens have been read. It is
            called a little earlier if the rest would be smaller than `min_chunk`.
        prompt_progress: called with (tokens read, all tokens) while a prompt is read; first with 0
            if it has several chunks.
        while_reading: abort callback, called ten times per second during an evaluation. If it
            raises, `eval` raises the error, and the text keeps earlier chunks. It must not use the
            model. It is not called on GPUs or in models with recurrent layers.
    """

    def __init__(
        self,
        model: Model,
        seq_id: int = 0,
        *,
        archive: str | os.PathLike[str] | None = None,
        keeps_logits: bool = False,
    ) -> None:
        self.model = model
        self.seq_id = seq_id
        self.lock = TextLock(model.lock)
        self.n_tokens = 0
        self.record: npt.NDArray[np.intc] = np.empty(0, np.intc)
        self.logits = _no_logits(model.n_vocab)
        self.keeps_logits = keeps_logits
        self.all_logits = _no_logits(model.n_vocab)
        self.priority = 0
        self.n_sampled = 0
        self.pauses: dict[int, Callable[[], None]] = {}
        self._alone = -1  # position of a token to evaluate separately
        self.prompt_progress: Callable[[int, int], None] | None = None
        self.while_reading: Callable[[], None] | None = None
        self._has_failed = False  # an evaluation of this text failed
        self._n_without_logits = 0  # first tokens, loaded without logits
        self.evicting, self.n_layer = model.evicting, model.n_layer
        self.cache = KVCache(model.address, seq_id, model.limits, evicting=model.evicting)
        self.archive = ArchiveFile(self.cache, archive) if model.recalls else None
        self.position_limit = self.cache.position_limit
        model.add(self)
        self._warn()
        self._grow(0 if self.evicting else model.window)

    # ---------------------------------------------------------------------------------------------
    # Tokens
    # ---------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> npt.NDArray[np.intc]:
        """The tokens of the text; [n_tokens]."""
        return self.record[: self.n_tokens]

    def _grow(self, n_tokens: int) -> None:
        """Enlarge the record for a text of `n_tokens` tokens and a draft.

        It grows by half, so that the cost per token does not depend on the length of the text.
        """
        n_least = n_tokens + self.model.n_batch
        if n_least > len(self.record):
            n_new = max(n_least, len(self.record) * 3 // 2, FIRST_RECORD)
            self.record = _grown(self.record, n_new)
        if self.keeps_logits and n_tokens > len(self.all_logits):
            n_new = max(n_tokens, len(self.all_logits) * 3 // 2)
            self.all_logits = _grown(self.all_logits, n_new)

    # ---------------------------------------------------------------------------------------------
    # Evaluation
    # ---------------------------------------------------------------------------------------------

    def read(self, tokens: Sequence[int]) -> None:
        """Evaluate a prompt or a turn.

        It resets the record of retrieved rows (see `Text.recalled`). With recall, the last token is
        evaluated separately: it attends to all rows that the other tokens retrieved most.

        Args:
            tokens: tokens to read.

        Raises:
            PyH2OError: see `eval`.
        """
        with self.lock:
            self.cache.reset_found()
            if len(tokens) > 1 and self.model.settings.prefill != "exact":
                end = self.n_tokens + len(tokens)
                if self.model.recalls and end > self.cache.limits.capacity:
                    self._alone = end - 1
            try:
                self.eval(tokens)
            finally:
                self.pauses.clear()
                self._alone = -1

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the first `n_tokens`.

        Raises:
            ContextLimitError: the text would exceed `position_limit`.
            EvictedError: `n_tokens` was reduced to where rows have been evicted.
            SettingsError: an exact prefill needs more memory than `prefill_mib` or than is free, or
                more positions than the model was trained on; nothing was read.
            DecodeError: llama.cpp failed, for example because attention is NaN.
            PolicyError: the policy returns scores that are not finite numbers.
            StateError: a picture is not available, or is incomplete although it must be evaluated
                in one batch.
            BaseException: an error of the policy; the batch was not evaluated.
        """
        with self.lock:
            n_all = len(tokens)
            if self.is_within_picture(self.n_tokens):
                raise StateError(WITHIN)
            self.cache.check_positions(self.n_tokens + n_all)
            self._n_without_logits = min(self._n_without_logits, self.n_tokens)
            self._grow(self.n_tokens + n_all)
            # callers may have reduced `n_tokens`
            if not self.cache.remove_tail(self.n_tokens) and self.evicting:
                raise EvictedError(
                    f"cannot truncate the text to {self.n_tokens} tokens: rows before that were "
                    "evicted; call reset() and evaluate the text again"
                )
            with self.cache.making_room(n_all):
                self._evaluate_chunks(tokens)

    def _evaluate_chunks(self, tokens: Sequence[int]) -> None:
        n_all, n_read = len(tokens), 0
        progress = self.prompt_progress if n_all > 1 else None
        if progress is not None and n_all > self.model.n_batch:
            progress(0, n_all)
        while n_read < n_all:
            is_whole = self._looks_ahead and is_of_picture(tokens[n_read])
            n_whole = n_of_picture(tokens[n_read:]) if is_whole else 0
            size = self._next_chunk(n_all - n_read, n_whole)
            size = n_whole or n_of_a_kind(tokens[n_read : n_read + size])
            self._evaluate(tokens[n_read : n_read + size])
            n_read += size
            # no mark before a token evaluated separately: another continuation would not pause here
            if self.n_tokens - 1 == self._alone or (size > 1 and self.n_tokens != self._alone):
                self.cache.mark()
            if progress is not None:
                progress(n_read, n_all)

    def _next_chunk(self, n_left: int, n_whole: int) -> int:
        """Return the size of the next chunk of `n_left` tokens, and call the callbacks before it.

        A callback divides a chunk only at a multiple of `search_chunk`, into parts of at least
        `min_chunk` tokens. It does not divide the first `n_whole` tokens.
        """
        start, least = self.n_tokens, self.model.min_chunk
        size = self.cache.chunk(start, n_left, self.model.n_batch)
        size = min(size, self._alone - start) if start < self._alone else size
        size = n_whole or size
        for end in sorted(self.pauses):
            if not start <= end < start + size:
                continue
            action, n = self.pauses.pop(end), 0 if n_whole else min(end - start, size - least)
            n -= n % self.model.search_chunk
            if n >= least:
                self.pauses[start + n] = action
                return n
            if start:
                action()
        return size

    def _evaluate(self, tokens: Sequence[int]) -> None:
        """Evaluate a chunk; after an error, the text keeps the tokens evaluated before."""
        n = len(tokens)
        of_picture = self.model.embeddings(tokens) if is_of_picture(tokens[0]) else (None, None)
        job = Job(
            seq_id=self.seq_id,
            tokens=tokens,
            start=self.n_tokens,
            wants=[True] * n if self.keeps_logits else [False] * (n - 1) + [True],
            embeddings=of_picture[0],
            places=of_picture[1],
            looks_ahead=self._looks_ahead and is_of_picture(tokens[0]),
            priority=self.priority,
            check=self.while_reading,
        )
        try:
            self.model.batcher.evaluate(job)
        except BaseException as error:
            self.logits = self.logits[:0]
            self._has_failed |= isinstance(error, DecodeError)
            raise
        else:
            self.logits = np.stack(job.logits)
        finally:
            start, end = self.n_tokens, self.n_tokens + job.done
            self.record[start:end] = tokens[: job.done]
            if self.keeps_logits and job.done:
                self.all_logits[start:end] = job.logits
            self.n_tokens = end
        self._warn()

    def _warn(self) -> None:
        """Issue the warnings of the cache, each once."""
        for line in self.cache.notes():
            warnings.warn(line, RuntimeWarning, stacklevel=2)

    def is_within_picture(self, n_tokens: int) -> bool:
        """Return whether the first `n_tokens` tokens end within a non-causal picture."""
        last = int(self.record[n_tokens - 1]) if self._looks_ahead and n_tokens else 0
        return is_of_picture(last) and not last & ENDS

    @property
    def _looks_ahead(self) -> bool:
        projector = self.model.projector
        return projector is not None and projector.looks_ahead

    def room_in_batch(self) -> int:
        """Return the maximum size of the next chunk; 0 if a compaction comes first."""
        with self.lock:
            return self.cache.room(self.n_tokens, self.model.n_batch)


def _no_logits(n_vocab: int) -> npt.NDArray[np.single]:
    return np.empty((0, n_vocab), np.single)


def _grown(array: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
    """Return a copy with more rows, which are not initialised."""
    grown = np.empty((n_rows, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
