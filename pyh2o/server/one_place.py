"""One place of an engine for several answers to a prompt, which is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..core.beginnings import as_in_text, keep_prefix, prefix_kept
from ..engine import Engine
from ..engine.places import Place
from ..limits import DEFAULT_STORE_MIB
from ..writing.cache_copies import AT_ONCE, CacheCopies
from .bodies import N_SEEDS


class OnePlace:
    """Stands for an engine while it is open: all texts get the same place.

    Each goes back to the end of the prompt, with a copy of the cache where rows were evicted since.
    In places of their own the answers would push other texts out of theirs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held = ExitStack()
        self._place: Place | None = None

    def __enter__(self) -> OnePlace:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    @contextmanager
    def text(
        self, tokens: Sequence[int], *, n_new: int | None = 0, **terms: Any
    ) -> Iterator[Place]:
        """As `Engine.text`; the first call waits for the place."""
        place = self._place
        if place is None:
            place = self._held.enter_context(self._engine.text(tokens, n_new=n_new, **terms))
            self._place = place
            self._copies = CacheCopies(place.text, AT_ONCE * DEFAULT_STORE_MIB)
            self._prompt = as_in_text(place.text, place.prompt)
            self._copy_before_end(place, place.prompt, n_new)
        else:
            self._go_back(place, place.prompt)
            place.set_seed((place._seed + 1) % N_SEEDS)
        try:
            yield place
        finally:
            place.end()

    def _copy_before_end(self, place: Place, tokens: Sequence[int], n_new: int | None) -> None:
        text = place.text
        n_text = len(self._prompt)
        end = n_text - text.model.least_piece  # fewer would be rounded otherwise
        stored = text.pauses.get(end)

        def pause() -> None:  # there, or at the end of a piece before
            n_left = n_text - text.n_tokens
            self._copies.take(None if n_new is None else n_left + n_new)
            if stored is not None:
                stored()

        if n_text - len(tokens) + prefix_kept(text, tokens) > end:
            keep_prefix(text, tokens)
            pause()
        else:
            text.pauses[end] = pause

    def _go_back(self, place: Place, tokens: Sequence[int]) -> None:
        n_without = len(tokens) - prefix_kept(place.text, tokens)
        prompt = self._prompt
        if self._copies.n_to_read(prompt) < n_without and not self._copies.load(prompt):
            place.reset()
