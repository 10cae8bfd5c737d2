"""The base of conversations and stories: a text in a model's cache, its pins and its file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..core.text import HasText, Text, text_of
from ..errors import SessionError, SettingsError, StateError
from ..writing.cached_text import CachedText, Span
from ..writing.sampling import Sampling
from .database import Database
from .identity import model_identity, settings_identity
from .kv_file import read_kv, write_kv
from .layout import Pins, check_pins, merged, without
from .messages import Contents, Message, packed
from .older import is_older, read_older
from .text_settings import TextSettings, within

# Maximum time between two records of an answer in progress.
SECONDS = 2.0
# The KV cache is saved again when the text has grown by this fraction.
GROWTH = 1 / 8


AnySession = TypeVar("AnySession", bound="TextSession")


@dataclass
class Place:
    """Where a text is stored.

    Attributes:
        text: its id in the database.
        cached: tokens in its KV file, as bytes of a `Message`.
        due: time of the next record of an answer in progress.
    """

    database: Database
    text: int
    cached: bytes = b""
    due: float = 0.0


class TextSession:
    """A text that can be saved, loaded and continued.

    Attributes:
        llm: the text of the model.
        sampling: sampling settings.
        place: where it is stored; None if nowhere.
        reread_reason: why the whole text is read again after it was loaded; "" if its KV cache was
            loaded.
    """

    kind: ClassVar[str]

    llm: Text
    place: Place | None = None
    reread_reason: str = ""
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
        for span in self._text.dropped:
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

    def _stop(self) -> None:
        """End the answer in progress."""

    def _span(self, start: int, end: int) -> Span:
        """Check a span, and prepare for a change of its pins."""
        self._settle()
        if not 0 <= start < end <= len(self.tokens):
            raise SettingsError(
                f"cannot pin tokens from {start} to {end}: the text has {len(self.tokens)} tokens"
            )
        return start, end

    # ---------------------------------------------------------------------------------------------
    # Storage
    # ---------------------------------------------------------------------------------------------

    def keep_in(self, database: Database, title: str) -> int:
        """Add the text to a database, where `store` and each answer in progress write it.

        Returns:
            the id of the text.

        Raises:
            SessionError: the database cannot be written.
        """
        with database.change():
            text = database.create(self.kind, title)
            self._write_to(database, text)
        self.place = Place(database, text)
        self.store()
        return text

    def store(self, *, leaving: bool = False) -> None:
        """Write the text to its place, and the KV cache if the text has grown by an eighth.

        Args:
            leaving: write the KV cache now, as the model will be used for another text.

        Raises:
            SessionError: the disk is full; what is stored is unchanged.
        """
        assert self.place is not None, "the text has no place: call keep_in first"
        self._stop()
        self._write_to(self.place.database, self.place.text)
        if self._text.is_there():
            place, cached = self.place, packed(self.llm.tokens)
            is_longer = len(cached) > (1 + GROWTH) * len(place.cached)
            if is_longer or (leaving and cached not in (b"", place.cached)):
                write_kv(place.database.kv_file(place.text), self.llm)
                place.cached = cached

    def save(self, path: str | Path) -> None:
        """Save the text to a session file, and its KV cache to PATH.kv.

        `load` continues bit for bit; with sliding windows up to rounding, as llama.cpp uses other
        cells for their rows. If the model has another text by now, there is no KV cache. A text
        that is in the file already is updated.

        Raises:
            SessionError: the file cannot be written; an old one is unchanged.
        """
        self._stop()
        with Database(path, single=True) as database:
            found = database.texts()
            if found and found[0].kind != self.kind:
                raise SessionError(
                    f"{path} holds a {found[0].kind}, not a {self.kind}: give another name"
                )
            text = found[0].id if found else database.create(self.kind, Path(path).stem)
            self._write_to(database, text)
            kv_file = database.kv_file(text)
            if self._text.is_there() and self.llm.n_tokens:
                write_kv(kv_file, self.llm)
            else:  # an old one may have rows with other scores
                kv_file.unlink(missing_ok=True)

    @classmethod
    def load(cls: type[AnySession], path: str | Path, llm: Text | HasText) -> AnySession:
        """Load a text from a session file, with any model and settings.

        If its KV cache does not fit, `reread_reason` says why, and the text is read again before it
        is continued; other rows may be kept. The same model reads the saved tokens. Another one
        tokenizes the texts, and loses pins and replaced answers. Pins that do not fit the budget
        are dropped.

        Args:
            path: the session file, also one of an older pyh2o; it is not changed.
            llm: the model. Its cache is emptied, unless the file is rejected.

        Raises:
            SessionError: the file does not exist, is damaged or of another kind.
            SettingsError: the system prompt does not fit the budget, or the model does not support
                the tools.
        """
        contents, kv_file = read_file(Path(path))
        return cls._of(contents, kv_file, text_of(llm))

    @classmethod
    def open(
        cls: type[AnySession], database: Database, text: int, llm: Text | HasText
    ) -> AnySession:
        """Load a text from a database, where it is stored from now on; see `load`."""
        session = cls._of(database.read(text), database.kv_file(text), text_of(llm))
        session.place = Place(database, text, packed(session.llm.tokens))
        return session

    @classmethod
    def _of(cls: type[AnySession], contents: Contents, kv_file: Path, llm: Text) -> AnySession:
        """Return the session of a text in a database."""
        raise NotImplementedError

    def _messages(self) -> tuple[list[Message], list[Message]]:
        """Return the messages of the text, and replaced answers to the last one."""
        raise NotImplementedError

    def _settings(self) -> TextSettings:
        """Return the settings to store with the text."""
        raise NotImplementedError

    def _common_settings(self) -> dict[str, Any]:
        """Return the settings that all kinds of texts have."""
        model = self.llm.model
        return {
            "model": model_identity(model),
            "settings": settings_identity(model),
            "sampling": self.sampling,
            "pins": self.pins,
            "dropped": self._text.dropped,
        }

    def _write_to(self, database: Database, text: int) -> None:
        messages, replaced = self._messages()
        settings = asdict(self._settings())
        database.write(text, messages, replaced, settings, self._pictures())

    def _record(self, *, at_once: bool = False) -> None:
        """Store an answer in progress if that is due; it is then opened as interrupted."""
        place = self.place
        if place is not None and (at_once or time.monotonic() >= place.due):
            place.due = time.monotonic() + SECONDS
            # an error does not end the answer: storing it will report the error
            with contextlib.suppress(SessionError):
                self._write_to(place.database, place.text)

    def _load_text(self, tokens: Sequence[int], saved: TextSettings, kv_file: Path) -> None:
        """Load the text, with the state of the cache if it fits."""
        pins, dropped = within(saved.pins, len(tokens)), within(saved.dropped, len(tokens))
        try:
            check_pins(self.llm, self.n_pinned, pins)
        except SettingsError:
            pins = ()
        try:
            cached, state = read_kv(kv_file, self.llm.model)
            self._text.load(tokens, cached, state, pins, dropped)
            if self.llm.archive_trouble:
                raise StateError(self.llm.archive_trouble)
        except StateError as error:
            self._text.begin(tokens, pins=pins, dropped=dropped)
            self.reread_reason = str(error)


def read_file(path: Path) -> tuple[Contents, Path]:
    """Return the text in a session file, and the path of its KV cache.

    Raises:
        SessionError: the file does not exist, or is damaged.
    """
    if is_older(path):
        return read_older(path), path.with_name(f"{path.name}.kv")
    with Database(path, single=True, read_only=True) as database:
        for info in database.texts():
            return database.read(info.id), database.kv_file(info.id)
    raise SessionError(f"the session file {path} is empty: use another copy of it")
