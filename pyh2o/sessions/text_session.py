"""What conversations and stories have in common: a text in a model's cache, its pins, its file."""

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
    """A text that goes on after it was saved and loaded.

    Attributes:
        llm: the text of the model that it is in.
        sampling: how tokens are drawn.
    """

    llm: Text
    sampling: Sampling
    _text: CachedText

    @property
    def tokens(self) -> list[int]:
        """Of all of the text, whether they are evaluated yet or not."""
        return self._text.tokens

    @property
    def unread(self) -> list[int]:
        """Those of them that are evaluated before the next one is drawn."""
        return self._text.unread

    # ---------------------------------------------------------------------------------------------
    # Pins
    # ---------------------------------------------------------------------------------------------

    @property
    def pins(self) -> Pins:
        """Spans that are pinned beside the first tokens: (start, end), end not included."""
        return self._text.pins

    @property
    def n_pinned(self) -> int:
        """First tokens that are pinned."""
        return self._text.n_pinned

    def pin(self, start: int, end: int) -> None:
        """Never evict these tokens from now on; what was evicted comes back from the archive.

        Raises:
            SettingsError: the text has no such tokens, or there is no room for them.
            PyH2OError: it is a conversation, and the model has another text by now.
        """
        pins = merged([*self.pins, self._span(start, end)])
        for gone in self._text.forgotten:
            pins = without(pins, *gone)
        check_pins(self.llm, self.n_pinned, pins)
        self._text.pin(pins)

    def unpin(self, start: int, end: int) -> None:
        """Let these tokens be evicted again, but for the first ones.

        Raises:
            SettingsError: the text has no such tokens.
            PyH2OError: it is a conversation, and the model has another text by now.
        """
        self._text.pin(without(self.pins, *self._span(start, end)))

    def _pictures(self) -> dict[str, bytes]:
        """The files of pictures in the text, by their hashes."""
        return {}

    def _settle(self) -> None:
        """Do what has to be done before a change."""

    def _span(self, start: int, end: int) -> Span:
        """Tokens that are there, before a change of their pins."""
        self._settle()
        if not 0 <= start < end <= len(self.tokens):
            raise SettingsError(
                f"there are no tokens from {start} to {end} to pin: the text has {len(self.tokens)}"
            )
        return start, end

    # ---------------------------------------------------------------------------------------------
    # Files
    # ---------------------------------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        """What the header of its file has, whatever it is; of no cache, if that is another's."""
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
        """Write the session file, with what is in the cache and the archive of recall.

        Args:
            path: the file.
            header: of it, which gets the id of the archive.
            portable: have the archive in this file, and not in one beside it.

        Raises:
            SessionError: it cannot be written; an old one is unchanged.
        """
        llm, is_there = self.llm, self._text.is_there()
        saving = llm.archive and is_there and llm.archive.saving(path, portable=portable)
        with saving or nullcontext() as archive:
            state = llm.kv_state() if is_there else b""
            data = asdict(header) | {"archive": archive}
            session = Session(header.kind, data, self.tokens, state, self._pictures())
            write_session(path, session)

    def _read_file(self, path: str | Path, session: Session, saved: SessionHeader) -> None:
        """Take over the text of a file; what of its state does not fit is to be read again."""
        if self.llm.archive is not None:
            self.llm.archive.open_saved(path, saved.archive)
        self._text.load(session.tokens, saved.cached, session.kv, saved.pins, saved.forgotten)
