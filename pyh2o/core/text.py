"""A text: a sequence of a model with tokens, cache and logits."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..cache.kv_cache import FloatArray, IntArray
from ..cache.recalled import RecalledSpan, passages
from ..cache.statistics import KVStatistics
from ..cache.watched import WatchedCache
from ..errors import StateError
from .evaluated import EvaluatedText
from .failures import LogitsArray, are_numbers
from .states import HEADER_BYTES, check_header, state_header


class Text(EvaluatedText):
    """A text of a model: truncation, pinning, statistics and states."""

    # ---------------------------------------------------------------------------------------------
    # Truncation
    # ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the text and the cache."""
        with self.lock:
            # NaN rows would make the logits of later tokens NaN
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

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Return whether the text can be truncated to its first `n_tokens` tokens exactly."""
        with self.lock:
            return n_tokens in (0, self.n_tokens) or (
                self.cache.can_remove_tail(n_tokens) and not self.is_within_picture(n_tokens)
            )

    def remove_tail(self, n_tokens: int) -> bool:
        """Truncate the text to its first `n_tokens` tokens, if all their rows are still there.

        At least one token must be evaluated before the next one can be sampled.

        Returns:
            False, without a change, if rows were evicted that the shorter text needs.

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
        """Remove rows of an evaluation that Ctrl-C aborted before its tokens were recorded.

        Returns:
            False if it evicted rows of the text, or if the text is empty: call reset().
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
    # Contents of the cache
    # ---------------------------------------------------------------------------------------------

    @property
    def kv(self) -> KVStatistics:
        """Statistics of the KV cache."""
        with self.lock:
            return self.cache.statistics(self.n_tokens)

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Return token positions and scores of the rows of a layer (see `Llama.kv_rows`)."""
        with self.lock:
            return self.cache.rows(layer)

    def recalled(self) -> list[RecalledSpan]:
        """Return the evicted passages that the last prompt and its answer attended to most.

        They are in text order.
        """
        with self.lock:
            return self._passages()

    @property
    def archive_trouble(self) -> str:
        """The error of the archive, in one line; "" for none."""
        with self.lock:
            return self.archive.error if self.archive is not None else ""

    def _passages(self) -> list[RecalledSpan]:
        weights = self.cache.found(self.n_tokens)
        return passages(weights, self.tokens, self.model.detokenize)

    def watched(self, *, rows: bool = True) -> WatchedCache:
        """Return the contents of the cache between two batches, while another thread may use it.

        Args:
            rows: whether to copy positions and scores of rows.
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
                recalled=tuple((span.start, span.end) for span in self._passages()),
            )

    # ---------------------------------------------------------------------------------------------
    # States
    # ---------------------------------------------------------------------------------------------

    def kv_state(self) -> mmap:
        """Return the state of the KV cache: rows, scores, positions and counters.

        It starts with hashes of the model, including LoRA and RoPE settings, and of the tokens.

        It is in an anonymous mapping, which is returned to the system when it is freed; malloc's
        arenas of each thread would keep their largest size.

        Raises:
            StateError: an aborted evaluation evicted rows.
        """
        with self.lock:
            # Ctrl-C can leave rows of tokens that are not in the record.
            if not self.cache.remove_tail(self.n_tokens):
                raise StateError(
                    "an aborted evaluation has evicted rows: call reset() and evaluate the text "
                    "again"
                )
            return self.cache.state(state_header(self.model.rows_identity, self.tokens))

    def load_kv_state(self, data: bytes | mmap, tokens: Sequence[int] | IntArray) -> None:
        """Load a state from `kv_state`, after which the text continues bit for bit.

        With sliding windows it continues up to rounding, as llama.cpp uses other cells for their
        rows. At least one token must be evaluated before the next one can be sampled.

        Args:
            data: a state of a text with the same model and settings.
            tokens: the text; [n_tokens].

        Raises:
            StateError: the state is damaged, or from another model, other tokens, other settings or
                another version. The text and the cache are then empty.
        """
        with self.lock:
            self.reset()
            try:
                check_header(data, self.model.rows_identity, tokens)
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
        """Whether `all_logits` has the logits of the whole text, which a loaded text may lack."""
        return self.keeps_logits and self._n_without_logits == 0

    def load_logits(self, logits: npt.NDArray[np.single]) -> None:
        """Set the logits of all tokens of a loaded text; [n_tokens, n_vocab]."""
        if self.keeps_logits and len(logits) == self.n_tokens:
            self.all_logits[: self.n_tokens] = logits
            self._n_without_logits = 0


class HasText(Protocol):
    """An object with a text, such as a `Llama`."""

    text: Text


def text_of(owner: Text | HasText) -> Text:
    """Return a text itself, or the text of a `Llama`."""
    return owner if isinstance(owner, Text) else owner.text


def last_logits(text: Text) -> LogitsArray:
    """Return the logits of the next token; [n_vocab].

    Raises:
        StateError: no token was evaluated since the text was reset, truncated or loaded, or since
            an evaluation failed.
    """
    if len(text.logits) == 0:
        raise StateError(
            "there are no logits to sample from after a reset, truncation or loading: evaluate a "
            "token first"
        )
    last: LogitsArray = text.logits[-1]
    return last
