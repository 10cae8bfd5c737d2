"""The base of conversations and stories: a text in a model's cache, its pins and its file."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.text import Text
from ..errors import SettingsError
from ..writing.cached_text import CachedText, Span
from ..writing.sampling import Sampling
from .headers import SessionHeader, model_identity, settings_identity
from .layout import Pins, check_pins, merged, without
from .session_file import Session, write_session


class TextSession:
    """A text that can be saved, loaded and continued.

    Attributes:
        llm: the text of the model.
        sampling: sampling settings.
    """

    llm: Text
    sampling: Sampling
    _text: CachedText

    @property
    def tokens(self) -> list[int]:
        """All tokens of the text, evaluated or not."""
        return self._text.tokens

    @property
    def unread(self) -> list[int]:
        """The last tokens, which are not evaluated yet."""
        return self._text.unread

    # ---------------------------------------------------------------------------------------------
    # Pins
    # ---------------------------------------------------------------------------------------------

    @property
    def pins(self) -> Pins:
        """Pinned spans other than the first tokens: (start, end), end not included."""
        return self._text.pins

    @property
    def n_pinned(self) -> int:
        """Number of first tokens that are pinned."""
        return self._text.n_pinned

    def pin(self, start: int, end: int) -> None:
        """Pin tokens from `start` to `end`; evicted rows are restored from the archive.

        Raises:
            SettingsError: the text has no such tokens, or they do not fit the budget.
        """
        pins = merged([*self.pins, self._span(start, end)])
        for span in self._text.forgotten:
            pins = without(pins, *span)
        check_pins(self.llm, self.n_pinned, pins)
        self._text.pin(pins)

    def unpin(self, start: int, end: int) -> None:
        """Allow eviction of these tokens again, except for the first ones.

        Raises:
            SettingsError: the text has no such tokens.
        """
        self._text.pin(without(self.pins, *self._span(start, end)))

    def _pictures(self) -> dict[str, bytes]:
        """Return the files of pictures in the text, by their hashes."""
        return {}

    def _settle(self) -> None:
        """Prepare for a change of the text."""

    def _span(self, start: int, end: int) -> Span:
        """Check a span, and prepare for a change of its pins."""
        self._settle()
        if not 0 <= start < end <= len(self.tokens):
            raise SettingsError(
                f"cannot pin tokens from {start} to {end}: the text has {len(self.tokens)} tokens"
            )
        return start, end

    # ---------------------------------------------------------------------------------------------
    # Files
    # ---------------------------------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        """Return the header fields that all kinds of sessions have."""
        model = self.llm.model
        return {
            "model": model_identity(model),
            "settings": settings_identity(model),
            "sampling": self.sampling,
            "cached": self.llm.n_tokens if self._text.is_there() else 0,
            "pins": self.pins,
            "forgotten": self._text.forgotten,
        }

    def _write_file(
        self, path: str | Path, header: SessionHeader, *, portable: bool = False
    ) -> None:
        """Write the session file, with the state of the cache, and the archive.

        Args:
            path: the session file.
            header: its header, to which the id of the archive is added.
            portable: whether to write the archive into this file.

        Raises:
            SessionError: the file cannot be written; an old one is unchanged.
        """
        llm, is_there = self.llm, self._text.is_there()
        saving = llm.archive and is_there and llm.archive.saving(path, portable=portable)
        with saving or nullcontext() as archive:
            state = llm.kv_state() if is_there else b""
            data = asdict(header) | {"archive": archive}
            session = Session(header.kind, data, self.tokens, state, self._pictures())
            write_session(path, session)

    def _read_file(self, path: str | Path, session: Session, saved: SessionHeader) -> None:
        """Load the text of a file; if its state does not match, the text is read again."""
        if self.llm.archive is not None:
            self.llm.archive.open_saved(path, saved.archive)
        self._text.load(session.tokens, saved.cached, session.kv, saved.pins, saved.forgotten)
