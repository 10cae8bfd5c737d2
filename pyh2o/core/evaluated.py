"""The tokens of a text as they are evaluated, piece by piece, and the logits behind them."""

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

# Tokens of the text that are made room for at once.
FIRST_RECORD = 4096


class EvaluatedText:
    """The tokens of one sequence of a model, and what comes next.

    Args:
        model: a model; it stays open while this is used.
        seq_id: the sequence of its context that is this text.
        archive: a file for the archive, so that it takes no memory; None for memory.
        keeps_logits: whether the logits of all tokens are kept.

    Raises:
        SettingsError: the archive's file cannot be used.

    Attributes:
        lock: to hold while native memory is used, including that of `cache`.
        cache: what the KV cache has of it.
        n_tokens: of the text; to set it back and go on is to shorten the text.
        record: tokens, of which the first `n_tokens` are the text; [at least n_tokens].
        logits: of the last evaluation; [n_outputs, n_vocab]. Without outputs nothing can be drawn.
        all_logits: those of all tokens, if they are kept; [at least n_tokens, n_vocab].
        archive: where the archive of recall lies; None if there is none.
        position_limit: most tokens of the text; 2**31 - 2**20 where positions are re-based.
        priority: texts of a higher one are read first.
        n_sampled: tokens that were drawn behind it, or behind texts that were here before.
        pauses: what is called when so many tokens of a text have been read, before the next ones; a
            little earlier where these would be too few to be rounded as without a pause.
        prompt_progress: called with (tokens read, tokens in all) while a prompt is read, first with
            0 where that takes several pieces.
        while_reading: called ten times a second while tokens are computed, to break that off: what
            it raises comes out of `eval`, as Ctrl-C does. What was read before stays in the text.
            It must not use the model. Not on GPUs, nor in models with recurrent layers.
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
        self._alone = -1  # position of a token that is evaluated by itself
        self.prompt_progress: Callable[[int, int], None] | None = None
        self.while_reading: Callable[[], None] | None = None
        self._has_failed = False  # to evaluate tokens of the text
        self._n_without_logits = 0  # first tokens of a text that was loaded without them
        self.evicting, self.n_layer = model.evicting, model.n_layer
        self.cache = KVCache(model.address, seq_id, model.limits, evicting=model.evicting)
        self.archive = ArchiveFile(self.cache, archive) if model.recalls else None
        self.position_limit = self.cache.position_limit
        model.add(self)
        self._warn()
        self._grow(0 if self.evicting else model.window)

    def close(self) -> None:
        """Remove a file of an archive that no session was saved with, once the model is closed."""
        archive, self.archive = self.archive, None
        if archive is not None and not self.model.lock.forked:
            archive.remove_unsaved()

    def __del__(self) -> None:
        if "archive" in vars(self):  # its set-up may have ended before
            self.close()

    # ---------------------------------------------------------------------------------------------
    # Tokens
    # ---------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> npt.NDArray[np.intc]:
        """Those of the text; [n_tokens]."""
        return self.record[: self.n_tokens]

    def _grow(self, n_tokens: int) -> None:
        """Let the record hold so many tokens, and what a draft model adds.

        It grows by half at a time, so that a token costs the same however long the text is.
        """
        n_least = n_tokens + self.model.n_batch
        if n_least > len(self.record):
            n_new = max(n_least, len(self.record) * 3 // 2, FIRST_RECORD)
            self.record = _grown(self.record, n_new)
        if self.keeps_logits and n_tokens > len(self.all_logits):
            n_new = max(n_tokens, len(self.all_logits) * 3 // 2)
            self.all_logits = _grown(self.all_logits, n_new)

    # ---------------------------------------------------------------------------------------------
    # Going on
    # ---------------------------------------------------------------------------------------------

    def read(self, tokens: Sequence[int], *, before_end: Callable[[], None] | None = None) -> None:
        """Evaluate a prompt or a turn.

        From here on it is noted what is found among evicted rows (see `recalled`). Where there are
        such, the last token comes alone: it attends to the whole of what the others looked at most.

        Args:
            tokens: to read.
            before_end: called before the last tokens are evaluated, which are needed for the next
                one to be drawn: so many that they are rounded as if there were no pause. Not with
                an exact prefill.

        Raises:
            PyH2OError: as `eval` does.
        """
        with self.lock:
            self.cache.forget_found()
            if len(tokens) > 1 and self.model.settings.prefill != "exact":
                end = self.n_tokens + len(tokens)
                if before_end is not None:
                    self.pauses[max(self.n_tokens, end - self.model.min_chunk)] = before_end
                if self.model.recalls and end > self.cache.limits.capacity:
                    self._alone = end - 1
            try:
                self.eval(tokens)
            finally:
                self.pauses.clear()
                self._alone = -1

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` there are.

        Raises:
            ContextLimitError: they need more positions than there are.
            EvictedError: `n_tokens` was set back to where rows have been evicted.
            SettingsError: an exact prefill needs more memory than `prefill_mib`, or than there is,
                or more positions than the model was trained on; nothing has been read.
            DecodeError: llama.cpp fails, as where the model's attention is no number.
            PolicyError: the policy gives rows scores that are no finite numbers.
            StateError: a picture of the text is not here, or only a part of one would be read that
                is computed at once.
            BaseException: what the policy raises; the batch that it was asked for was not read.
        """
        with self.lock:
            n_all = len(tokens)
            if self.is_within_picture(self.n_tokens):
                raise StateError(WITHIN)
            self.cache.check_positions(self.n_tokens + n_all)
            self._n_without_logits = min(self._n_without_logits, self.n_tokens)
            self._grow(self.n_tokens + n_all)
            # programs may have set `n_tokens` back
            if not self.cache.remove_tail(self.n_tokens) and self.evicting:
                raise EvictedError(
                    f"cannot go back to {self.n_tokens} tokens: rows before that were evicted; "
                    "call reset() and evaluate the text again"
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
            # a text that goes on otherwise would not be cut before a token that comes alone
            if self.n_tokens - 1 == self._alone or (size > 1 and self.n_tokens != self._alone):
                self.cache.mark()
            if progress is not None:
                progress(n_read, n_all)

    def _next_chunk(self, n_left: int, n_whole: int) -> int:
        """Of so many tokens those to evaluate next; pauses that come before them are made.

        A pause divides what is evaluated at once, but not so that it is rounded otherwise, nor what
        looks for evicted rows together, nor the first `n_whole` tokens.
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
        """Evaluate tokens at once; if that is broken off, those that were evaluated stay."""
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
        """Warn once of what the archive has lost, and of what the CPU computes for a GPU."""
        for line in self.cache.notes():
            warnings.warn(line, RuntimeWarning, stacklevel=2)

    def is_within_picture(self, n_tokens: int) -> bool:
        """Whether its first `n_tokens` tokens end within a picture whose tokens look ahead."""
        last = int(self.record[n_tokens - 1]) if self._looks_ahead and n_tokens else 0
        return is_of_picture(last) and not last & ENDS

    @property
    def _looks_ahead(self) -> bool:
        projector = self.model.projector
        return projector is not None and projector.looks_ahead

    def room_in_batch(self) -> int:
        """Tokens that the next evaluation takes at once; 0 if a compaction comes first."""
        with self.lock:
            return self.cache.room(self.n_tokens, self.model.n_batch)


def _no_logits(n_vocab: int) -> npt.NDArray[np.single]:
    return np.empty((0, n_vocab), np.single)


def _grown(array: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
    """A copy with more rows; the new ones are not set."""
    grown = np.empty((n_rows, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
