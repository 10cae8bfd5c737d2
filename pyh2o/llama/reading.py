"""The text of a model with a cache of fixed size: evaluated, looked up, set back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ..cache.breaking import breakable
from ..errors import DecodeError, EvictedError, SettingsError, StateError
from ..generation.logits import are_numbers, last_logits
from . import recalled
from .evicting import EvictingLlama, address
from .failures import explained
from .recalled import RecalledSpan

# Tokens of the text that are made room for at once.
FIRST_RECORD = 4096
# Fewer tokens are soon computed: Ctrl-C waits for them, and they take no longer for it.
LEAST_BREAKABLE = 8
# Of a text that takes several pieces, with somebody who is told how far it is.
FIRST_PIECE = 32


class ReadingLlama(EvictingLlama):
    """The class with a cache that evicts, and all that reads a text into it.

    Args:
        model_path: a GGUF file.
        prompt_progress: called with (tokens read, tokens in all) while a prompt is read.
        **kwargs: as for `EvictingLlama`.

    Raises:
        PyH2OError: as `Llama` says.

    Attributes:
        pauses: what is called when so many tokens of a text have been read, before the next ones; a
            little earlier where these would be too few to be rounded as without a pause.
        while_reading: called ten times a second while tokens are computed, to break that off: what
            it raises comes out of `eval`, as Ctrl-C does. What was read before stays in the text.
            It must not use the model. Not on GPUs, nor in models with recurrent layers.
    """

    # Whether batches are computed in the thread that evaluates them.
    _breakable = True

    def __init__(
        self,
        model_path: str,
        *,
        prompt_progress: Callable[[int, int], None] | None,
        **kwargs: Any,
    ) -> None:
        self.prompt_progress = prompt_progress
        self.pauses: dict[int, Callable[[], None]] = {}
        self.while_reading: Callable[[], None] | None = None
        self._has_failed = False  # to evaluate tokens of the text
        self._n_last = 1  # tokens of the last evaluation
        self._n_without_logits = 0  # first tokens of a text that was loaded without them
        super().__init__(model_path, **kwargs)

    def reset(self) -> None:
        """Empty the text and the cache."""
        with self.guard:
            is_sound = self._is_sound()
            super().reset()
            self._has_failed = False
            self._n_without_logits = 0
            self._empty_cache(zero=not is_sound)
            if self._archive is not None:
                self._archive.begin_text()

    def _is_sound(self) -> bool:
        """Whether rows are numbers: if not, neither are the logits of tokens that see them."""
        if self._has_failed:
            return False
        return self.n_tokens == 0 or self._requires_eval or are_numbers(last_logits(self))

    def _empty_cache(self, *, zero: bool) -> None:
        """Remove all rows; `zero`: as the next text would not be sound with them in free cells."""
        memory = llama_cpp.llama_get_memory(self.ctx)
        if memory is not None:
            llama_cpp.llama_memory_clear(memory, zero)

    def close(self) -> None:
        """Free the model; a file of an archive that no session was saved with goes."""
        archive, self._archive = getattr(self, "_archive", None), None
        super().close()
        if archive is not None:
            archive.remove_unsaved()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` there are.

        Raises:
            ContextLimitError: they need more positions than there are.
            EvictedError: `n_tokens` was set back to where rows have been evicted.
            SettingsError: an exact prefill needs more memory than `prefill_mib`, or than there is,
                or more positions than the model was trained on; nothing has been read.
            DecodeError: llama.cpp fails, as where the model's attention is no number.
            PolicyError: the policy gives rows scores that are no finite numbers.
            BaseException: what the policy raises; the batch that it was asked for was not read.
        """
        with self.guard:
            self._cache.check_positions(self.n_tokens + len(tokens))
            self._n_without_logits = min(self._n_without_logits, self.n_tokens)
            if self.evicting:
                self._grow_record(self.n_tokens + len(tokens))
                self._drop_rows_behind()
            else:
                self._grow_scores(self.n_tokens + len(tokens))
            with self._cache.making_room(len(tokens)):
                if len(tokens) > self.n_batch:
                    self._begin_to_read(len(tokens))
                n_read = 0
                while n_read < len(tokens):
                    size = self._next_piece(len(tokens) - n_read)
                    self._evaluate(tokens[n_read : n_read + size])
                    n_read += size
                    self._n_last = size
                    if len(tokens) > 1:
                        self._read(size, n_read, len(tokens))

    def _next_piece(self, n_left: int) -> int:
        """Of so many tokens those to evaluate next; pauses that come before them are made.

        A pause divides what is evaluated at once, but not so that it is rounded otherwise, nor what
        looks for evicted rows together.
        """
        start, least = self.n_tokens, self.least_piece
        size = self._cache.chunk(start, n_left, self.n_batch)
        for end in sorted(self.pauses):
            if not start <= end < start + size:
                continue
            action, n = self.pauses.pop(end), min(end - start, size - least)
            n -= n % self.search_group
            if n >= least:
                self.pauses[start + n] = action
                return n
            if start:
                action()
        return size

    def _evaluate(self, tokens: Sequence[int]) -> None:
        """The parent's `eval` of a batch; if that is broken off, it has left no trace."""
        breaking: AbstractContextManager[None] = nullcontext()
        if len(tokens) >= LEAST_BREAKABLE and self._breakable:
            breaking = breakable(address(self.ctx), self.while_reading)
        try:
            with explained(), breaking:
                super().eval(tokens)
        except BaseException as error:
            self._requires_eval = True  # there are no logits
            self._has_failed |= isinstance(error, DecodeError)
            raise

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """The parent's.

        Raises:
            StateError: no token was evaluated since the text was emptied, shortened or loaded, or
                since an evaluation failed: what logits there are belong to another text.
            SettingsError: the logits of token `idx` are not there: llama.cpp ends the process.
        """
        self.guard.check()
        if self._requires_eval:
            raise StateError(
                "there are no logits to draw from, as a text has none that was emptied, shortened "
                "or loaded: evaluate a token first"
            )
        n_logits = self._n_last if self._logits_all else 1
        if idx is not None and self.n_tokens - idx > n_logits:
            raise SettingsError(
                f"of the last {self.n_tokens - idx} tokens only {n_logits} have logits to draw "
                "from: give logits_all=True, and send fewer tokens to a generator at once"
            )
        return super().sample(*args, idx=idx, **kwargs)

    def _drop_rows_behind(self) -> None:
        """Drop the rows behind `n_tokens`, which programs may have set back."""
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            raise EvictedError(
                f"cannot go back to {self.n_tokens} tokens: rows before that were evicted; "
                "call reset() and evaluate the text again"
            )

    def _grow_record(self, n_tokens: int) -> None:
        """Let the parent's record of the text hold so many tokens, and what a draft model adds.

        It grows by half at a time, so that a token costs the same however long the text is.
        """
        n_least = n_tokens + self.n_batch
        if n_least <= len(self.input_ids):
            return
        n_new = max(n_least, len(self.input_ids) * 3 // 2, FIRST_RECORD)
        self.input_ids = _grown(self.input_ids, n_new)
        self._grow_scores(n_new)

    @property
    def has_all_logits(self) -> bool:
        """Whether `scores` has the logits of the whole text; not of one that was loaded without."""
        return self._logits_all and self._n_without_logits == 0

    def _grow_scores(self, n_tokens: int) -> None:
        """Let the record of logits hold those of so many tokens, if there is one.

        For a draft model the parent keeps all logits, and makes room for those of one batch.
        """
        if self._logits_all and n_tokens > len(self.scores):
            self.scores = _grown(self.scores, max(n_tokens, len(self.scores) * 3 // 2))

    def _begin_to_read(self, n_all: int) -> None:
        """Before the first of several pieces; it is short, to know soon how long all take."""
        if self.prompt_progress is not None:
            n_first = max(FIRST_PIECE, self.search_group)
            self.pauses.setdefault(self.n_tokens + n_first, _nothing)
            self.prompt_progress(0, n_all)

    def _read(self, size: int, n_read: int, n_all: int) -> None:
        """After each piece of a text that is read."""
        if size > 1:
            self._cache.mark()
        if self.prompt_progress is not None:
            self.prompt_progress(n_read, n_all)

    def read(self, tokens: Sequence[int], *, before_end: Callable[[], None] | None = None) -> None:
        """Evaluate a prompt or a turn.

        From here on it is noted what is found among evicted rows (see `recalled`).

        Args:
            tokens: to read.
            before_end: called before the last tokens are evaluated, which are needed for the next
                one to be drawn: so many that they are rounded as if there were no pause. Not with
                an exact prefill.

        Raises:
            PyH2OError: as `eval` does.
        """
        with self.guard:
            self._cache.forget_found()
            if len(tokens) < 2 or before_end is None or self.settings.prefill == "exact":
                self.eval(tokens)
                return
            self.pauses[self.n_tokens + max(0, len(tokens) - self.least_piece)] = before_end
            try:
                self.eval(tokens)
            finally:
                self.pauses.clear()

    def recalled(self) -> list[RecalledSpan]:
        """The passages among what was evicted that the last prompt, and what came of it, looked at.

        In the order of the text; the strongest, if there are many.
        """
        with self.guard:
            return recalled.passages(self)

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Whether the text can be set back to its first `n_tokens` tokens exactly."""
        with self.guard:
            return n_tokens in (0, self.n_tokens) or self._cache.can_remove_tail(n_tokens)

    def remove_tail(self, n_tokens: int) -> bool:
        """Set the text back to its first `n_tokens` tokens, if all their rows are still there.

        At least one token has to be evaluated before the next one can be drawn.

        Returns:
            False if rows were evicted that the shorter text would still have; nothing is changed.

        Raises:
            ValueError: the text is shorter than that.
        """
        with self.guard:
            if not 0 <= n_tokens <= self.n_tokens:
                raise ValueError(f"the text has {self.n_tokens} tokens, not {n_tokens}")
            if not self.can_remove_tail(n_tokens):
                return False
            if n_tokens < self.n_tokens and self._ctx.kv_cache_seq_rm(-1, n_tokens, -1):
                self.n_tokens = n_tokens
                self._requires_eval = True
            return self.n_tokens == n_tokens

    def drop_surplus(self) -> bool:
        """Drop rows of an evaluation that Ctrl-C broke off before its tokens were recorded.

        Returns:
            False if rows of the text were evicted for it, or if there is no text: call reset().
        """
        with self.guard:
            return self.n_tokens > 0 and bool(self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1))


def _nothing() -> None:
    pass


def _grown(array: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
    """A copy with more rows; the new ones are not set."""
    grown = np.empty((n_rows, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
