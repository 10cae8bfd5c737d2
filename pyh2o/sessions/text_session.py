"""What conversations and stories have in common: a text in a model's cache, its pins, its file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..core.text import Text
from ..errors import SettingsError
from ..writing.cached_text import CachedText
from .pins import Pins, check_room, merged, without
from .session_file import Session, write_session


class TextSession:
    """A text that goes on after it was saved and loaded.

    Attributes:
        llm: the model.
    """

    llm: Text
    _text: CachedText

    @property
    def tokens(self) -> list[int]:
        """Of all of the text, whether they are evaluated yet or not."""
        return self._text.tokens

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
        self._settle()
        self._check_span(start, end)
        pins = merged([*self.pins, (start, end)])
        check_room(self.llm, self.n_pinned, pins)
        self._text.pin(pins)

    def unpin(self, start: int, end: int) -> None:
        """Let these tokens be evicted again, but for the first ones.

        Raises:
            SettingsError: the text has no such tokens.
            PyH2OError: it is a conversation, and the model has another text by now.
        """
        self._settle()
        self._check_span(start, end)
        self._text.pin(without(self.pins, start, end))

    def _settle(self) -> None:
        """Do what has to be done before a change."""

    def _check_span(self, start: int, end: int) -> None:
        if not 0 <= start < end <= len(self.tokens):
            raise SettingsError(
                f"there are no tokens from {start} to {end} to pin: the text has {len(self.tokens)}"
            )

    def _write_session(
        self,
        path: str | Path,
        kind: str,
        header: dict[str, Any],
        *,
        with_state: bool = True,
        portable: bool = False,
    ) -> None:
        """Write the session file, with what is in the cache and the archive of recall.

        Args:
            path: the file.
            kind: of session.
            header: of the file, which gets the id of the archive.
            with_state: False if the cache has another text by now.
            portable: have the archive in this file, and not in one beside it.

        Raises:
            SessionError: it cannot be written; an old one is unchanged.
        """
        llm = self.llm
        saving = llm.archive and with_state and llm.archive.saving(path, portable=portable)
        with saving or nullcontext() as archive:
            state = llm.kv_state() if with_state else b""
            header = {**header, "archive": archive}
            write_session(path, Session(kind, header, self.tokens, state))

    def _load_text(
        self, session: Session, archive: str | None, n_cached: int, n_known: int, pins: Pins
    ) -> None:
        """Take over the text of a file; what of its state does not fit is to be read again."""
        if self.llm.archive is not None:
            self.llm.archive.open_saved(session.path or "", archive)
        self._text.load(session.tokens, n_cached, n_known, session.kv, pins)
