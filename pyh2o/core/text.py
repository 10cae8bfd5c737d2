"""A text: a sequence of a model with its tokens, its cache and its logits."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..cache.kv_cache import FloatArray, IntArray
from ..cache.recalled import RecalledSpan, passages
from ..cache.rows import WatchedCache
from ..cache.statistics import KVStatistics
from ..errors import StateError
from .evaluated import EvaluatedText
from .failures import LogitsArray, are_numbers
from .states import HEADER_BYTES, check_header, state_header


class Text(EvaluatedText):
    """A text of a model, what the cache holds of it, and its states."""

    # ---------------------------------------------------------------------------------------------
    # Going back
    # ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the text and the cache."""
        with self.lock:
            # if rows were no numbers, neither are the logits of tokens that see them
            is_known = self.n_tokens > 0 and len(self.logits) > 0
            is_sound = not self._has_failed and (not is_known or are_numbers(self.logits[-1]))
            self.n_tokens = 0
            self.logits = self.logits[:0]
            self._has_failed = False
            self._n_without_logits = 0
            self.cache.clear(
                alone=self.model.n_texts == 1,
                zero=not is_sound or self.model.has_recurrent_layers,
            )
            if self.archive is not None:
                self.archive.begin_text()

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Whether the text can be set back to its first `n_tokens` tokens exactly."""
        with self.lock:
            return n_tokens in (0, self.n_tokens) or (
                self.cache.can_remove_tail(n_tokens) and not self.is_within_picture(n_tokens)
            )

    def remove_tail(self, n_tokens: int) -> bool:
        """Set the text back to its first `n_tokens` tokens, if all their rows are still there.

        At least one token has to be evaluated before the next one can be drawn.

        Returns:
            False if rows were evicted that the shorter text would still have; nothing is changed.

        Raises:
            ValueError: the text is shorter than that.
        """
        with self.lock:
            if not 0 <= n_tokens <= self.n_tokens:
                raise ValueError(f"the text has {self.n_tokens} tokens, not {n_tokens}")
            if not self.can_remove_tail(n_tokens):
                return False
            if n_tokens < self.n_tokens and self.cache.remove_tail(n_tokens):
                self.n_tokens = n_tokens
                self.logits = self.logits[:0]
            return self.n_tokens == n_tokens

    def drop_surplus(self) -> bool:
        """Drop rows of an evaluation that Ctrl-C broke off before its tokens were recorded.

        Returns:
            False if rows of the text were evicted for it, or if there is no text: call reset().
        """
        with self.lock:
            return self.n_tokens > 0 and self.cache.remove_tail(self.n_tokens)

    # ---------------------------------------------------------------------------------------------
    # Dropped spans
    # ---------------------------------------------------------------------------------------------

    def drop_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Drop spans of the text from the cache, such as the reasoning of a finished answer.

        Their rows are removed from the cache and the archive. All other rows keep their positions,
        and `tokens` still contains the dropped ones. A prompt is matched against the text without
        them (see `kept_positions`). Rows after a span were computed with it; sliding-window layers
        and recurrent states are not changed.

        If a span contains evicted rows, heads that evicted fewer of its rows than others keep some
        of them until later compactions, so that all heads have the same number of rows.

        The text can be shortened to a position before a span, which removes the span from
        `dropped_spans`, or to one after it, but not to its end. A full cache drops nothing, as its
        window would not hold more tokens.

        Args:
            spans: (start, end) positions, end not included; ascending, not adjacent, before the
                newest token.

        Raises:
            SettingsError: invalid or pinned spans; nothing is changed.
        """
        with self.lock:
            self.cache.drop_spans(spans)

    @property
    def dropped_spans(self) -> list[tuple[int, int]]:
        """The dropped spans of the text, ascending and not adjacent."""
        with self.lock:
            return self.cache.dropped_spans()

    @property
    def kept_positions(self) -> IntArray:
        """The positions of all tokens outside the dropped spans, ascending."""
        at = np.ones(self.n_tokens, np.bool_)
        for start, end in self.dropped_spans:
            at[start:end] = False
        return np.flatnonzero(at).astype(np.int32)

    # ---------------------------------------------------------------------------------------------
    # What the cache holds
    # ---------------------------------------------------------------------------------------------

    @property
    def kv(self) -> KVStatistics:
        """What the KV cache holds now and what it costs."""
        with self.lock:
            return self.cache.statistics(self.n_tokens)

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Token positions and scores of the rows that one layer holds (see `Llama.kv_rows`)."""
        with self.lock:
            return self.cache.rows(layer)

    def recalled(self) -> list[RecalledSpan]:
        """The passages among what was evicted that the last prompt, and what came of it, looked at.

        In the order of the text; the strongest, if there are many.
        """
        with self.lock:
            return passages(self)

    @property
    def archive_trouble(self) -> str:
        """What is wrong with the archive of recall, in one line; "" if nothing is."""
        with self.lock:
            return self.archive.trouble if self.archive is not None else ""

    def watched(self, *, rows: bool = True) -> WatchedCache:
        """What the cache holds between two batches, from any thread; the text may be in use.

        Args:
            rows: whether to copy whose rows it holds.
        """
        with self.model.lock.context():
            n_tokens = self.n_tokens + self.model.batcher.n_done(self.seq_id)
            layers = range(self.n_layer) if self.evicting and rows else ()
            return WatchedCache(
                evicting=self.evicting,
                n_layer=self.n_layer,
                n_tokens=n_tokens,
                kv=self.cache.statistics(n_tokens),
                rows=[self.cache.rows(layer) for layer in layers],
                recalled=tuple((span.start, span.end) for span in passages(self)),
            )

    # ---------------------------------------------------------------------------------------------
    # States
    # ---------------------------------------------------------------------------------------------

    def kv_state(self) -> mmap:
        """All that the KV cache holds: rows, scores, whose row lies where, counters.

        It begins with hashes of the model (as session files know it, with LoRA and RoPE settings)
        and of the tokens.

        It is in memory of its own that goes back to the system with it: in malloc's memory each
        thread's part would grow to what it ever had.

        Raises:
            StateError: an evaluation was broken off, and rows were evicted for it.
        """
        with self.lock:
            # Ctrl-C can leave rows of tokens that are not in the record.
            if not self.cache.remove_tail(self.n_tokens):
                raise StateError(
                    "an evaluation was broken off, and rows were evicted for it: call reset() and "
                    "evaluate the text again"
                )
            return self.cache.state(state_header(self.model, self.tokens))

    def load_kv_state(self, data: bytes | mmap, tokens: Sequence[int] | IntArray) -> None:
        """Put back what `kv_state` returned: the text goes on from there, bit for bit.

        With sliding windows that is to rounding: llama.cpp puts their rows into other cells.

        At least one token has to be evaluated before the next one can be drawn.

        Args:
            data: from `kv_state` of a text of the same model and settings.
            tokens: the text; [n_tokens].

        Raises:
            StateError: another model, other tokens, other settings, another version or damaged
                data. The text and the cache are then empty.
        """
        with self.lock:
            if self.archive is not None:
                self.archive.await_state()
            self.reset()
            try:
                check_header(data, self.model, tokens)
                self.cache.load_state(data, len(tokens), HEADER_BYTES)
            except StateError:
                self.reset()
                raise
            self._grow(len(tokens))
            self.record[: len(tokens)] = tokens
            self.n_tokens = len(tokens)
            self._n_without_logits = len(tokens)

    @property
    def has_all_logits(self) -> bool:
        """Whether `all_logits` has those of the whole text; not of one that was loaded without."""
        return self.keeps_logits and self._n_without_logits == 0

    def load_logits(self, logits: npt.NDArray[np.single]) -> None:
        """Take over those of all tokens, of a text that was loaded; [n_tokens, n_vocab]."""
        if self.keeps_logits and len(logits) == self.n_tokens:
            self.all_logits[: self.n_tokens] = logits
            self._n_without_logits = 0


class HasText(Protocol):
    """What has a text, such as a `Llama`."""

    text: Text


def text_of(owner: Text | HasText) -> Text:
    """A text, or the one that an object such as a `Llama` has."""
    return owner if isinstance(owner, Text) else owner.text


def last_logits(text: Text) -> LogitsArray:
    """Those that the next token is drawn from; [n_vocab].

    Raises:
        StateError: no token was evaluated since the text was emptied, shortened or loaded, or since
            an evaluation failed.
    """
    if len(text.logits) == 0:
        raise StateError(
            "there are no logits to draw from, as a text has none that was emptied, shortened "
            "or loaded: evaluate a token first"
        )
    last: LogitsArray = text.logits[-1]
    return last
