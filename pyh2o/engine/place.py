"""A place for one text among others: a `Llama` over one sequence of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ..cache.statistics import KVStatistics
from ..compat import completion
from ..compat.llama import Llama
from ..core.beginnings import prefix_kept
from ..core.text import Text
from ..errors import SettingsError


@dataclass(frozen=True)
class TextCounts:
    """What texts have taken so far.

    Attributes:
        prompt_tokens: of all prompts.
        cached_tokens: those of them that were in the cache, and were not read again.
        drawn_tokens: that were drawn, with those that ended a text.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    drawn_tokens: int = 0

    def __add__(self, other: TextCounts) -> TextCounts:
        return TextCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class PlaceReport:
    """What a place holds at one moment.

    Attributes:
        running: whether its text is being read or written; else it has ended.
        kv: its cache; `kv.position` is the length of the text in tokens.
        recalled: spans of evicted tokens that were looked at: (start, end), end not included.
    """

    running: bool
    kv: KVStatistics
    recalled: tuple[tuple[int, int], ...]


class Place(Llama):
    """A `Llama` for a thread of its own, whose text is one of several of a model.

    Attributes:
        shared_end: where a beginning ends that other texts have, too, and that is to be stored; 0
            for nowhere.
        owner: whose text this is, if nobody else may go on with it.
        keeps_text: whether the owner's text is here; the owner sets it once that is so.
    """

    shared_end = 0
    owner: object | None = None
    keeps_text = False
    _prompts = TextCounts()
    _begun: tuple[list[int], int] | None = None

    @property
    def counts(self) -> TextCounts:
        """Of all texts that were here so far."""
        return self._prompts + TextCounts(drawn_tokens=self.text.n_drawn)

    def begin_prompt(self, tokens: Sequence[int]) -> None:
        """Take the tokens of the prompt that is completed next, and count them."""
        n_cached = max(0, min(prefix_kept(self.text, tokens), len(tokens) - 1))
        self._begun = list(tokens), n_cached
        self._prompts += TextCounts(len(tokens), n_cached)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        request = completion.CompletionRequest(*args, **kwargs)
        (tokens, n_cached), self._begun = self._begun or (None, 0), None
        return completion.complete(self, request, tokens=tokens, n_cached=n_cached)

    def report(self, *, running: bool) -> PlaceReport:
        """What this place holds, from any thread; waits for the batch in the making."""
        watched = self.text.watched(rows=False)
        return PlaceReport(running, watched.kv, watched.recalled)

    def end(self) -> None:
        """Its text has ended, for now."""
        self.text.prompt_progress = self.text.while_reading = self._begun = None
        self.text.model.batcher.leave(self.text.seq_id)
        if self.owner is None:
            self.leave_session()

    def leave_session(self) -> None:
        """Drop a text whose archive lies beside a session: its file is that session's alone."""
        text: Text = self.text
        if text.archive is not None and text.archive.is_of_session:
            with text.guard:
                text.archive.leave()
                text.reset()

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the context is that of other texts, too.

        Raises:
            SettingsError: always.
        """
        raise SettingsError("embeddings come from a `Llama` of their own (embedding=True)")
