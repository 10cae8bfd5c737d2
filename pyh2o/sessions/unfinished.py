"""An answer or a passage in the making, beside the session file: what stays if a program is killed.

The file has the message and the answer so far, or the passage, but nothing of the cache: it is
small. Whoever reads the session finds them in it, as interrupted; the next save has them, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.prefixes import n_common
from ..system.files import replacement
from ..writing.finish import FINISH_INTERRUPTED
from .records import Count, record_of

if TYPE_CHECKING:
    from .turns import Answer, Dialogue

SUFFIX = ".unfinished"
# Between two notes of an answer.
SECONDS = 2.0


@dataclass(frozen=True)
class Unfinished:
    """What comes behind the first turns and tokens of a session; lists do without llama.cpp.

    Attributes:
        session: `sum_of` the tokens in the session's file.
        start: so many of the session's tokens stay.
        tokens: that come behind them.
        n_turns: so many of its turns stay.
        turn: that comes behind them, as the session's header has it.
        kept: answers to its message that were replaced, likewise.
        pictures: files of those in the message, in base64, by their hashes.
        story: what the header of a story has in the place of what it had.
        n_characters: so many of its text in the header's notes stay before that here.
    """

    session: int
    start: Count
    tokens: tuple[int, ...]
    n_turns: Count = 0
    turn: dict[str, Any] = field(default_factory=dict)
    kept: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)
    story: dict[str, Any] | None = None
    n_characters: Count = 0


def path_beside(session: str | Path) -> Path:
    """The file beside that of a session."""
    return Path(os.path.realpath(session) + SUFFIX)


def sum_of(tokens: Sequence[int]) -> int:
    """What tells the texts of sessions apart."""
    return zlib.crc32(np.asarray(tokens, "<i4").tobytes())


class Notes:
    """Writes down what is made while it is drawn, every few seconds."""

    def __init__(
        self,
        session: Path | None,
        tokens: Sequence[int],
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        """Beside a session that has these tokens, with pictures; nowhere if it is None."""
        self._path = session and path_beside(session)
        self._sum = sum_of(tokens) if session else 0
        files = pictures if session and pictures else {}
        self._pictures = {key: b64encode(data).decode() for key, data in files.items()}
        self._next = 0.0

    def note(
        self,
        answer: Answer,
        text: list[int],
        start: int,
        said: Dialogue,
        *,
        at_once: bool = False,
    ) -> None:
        """Write an answer down, if it is time; the text is another one from token `start` on."""
        if at_once or self.is_due:
            turn = replace(answer.made_turn(len(text)), finish=FINISH_INTERRUPTED)
            self._write(
                text,
                start,
                n_turns=len(said.turns),
                turn=asdict(turn),
                kept=[asdict(each) for each in said.kept],
                pictures=self._pictures,
            )

    @property
    def is_due(self) -> bool:
        """Whether it is time to write something down."""
        return self._path is not None and time.monotonic() >= self._next

    def note_story(
        self, text: list[int], start: int, story: dict[str, Any], n_characters: int
    ) -> None:
        """Write a passage down: what the header has now, and of its text what is new."""
        self._write(text, start, story=story, n_characters=n_characters)

    def _write(self, text: list[int], start: int, **made: Any) -> None:
        if self._path is None:
            return
        self._next = time.monotonic() + SECONDS
        noted = Unfinished(self._sum, start, tuple(text[start:]), **made)
        with (  # what is made goes on without; the end of it is saved, or an error
            contextlib.suppress(OSError),
            replacement(self._path, prefix=f".{self._path.name}-", mode=0o600) as file,
        ):
            file.write(json.dumps(asdict(noted)).encode())


def read_note(session: str | Path) -> Unfinished | None:
    """What is noted beside a session; None if that is nothing."""
    try:
        return record_of(Unfinished, json.loads(path_beside(session).read_bytes()), "note")
    except (OSError, ValueError):
        return None


def pictures_in(made: Unfinished | None) -> dict[str, bytes]:
    """The files of pictures in a note, by their hashes."""
    return {key: b64decode(data) for key, data in made.pictures.items()} if made else {}


def with_unfinished(
    made: Unfinished | None, header: dict[str, Any], tokens: list[int]
) -> tuple[dict[str, Any], list[int]]:
    """Header and tokens of a session with what is noted beside it, if that belongs to it."""
    if made is None or made.session != sum_of(tokens):
        return header, tokens  # it was saved since
    text = [*tokens[: made.start], *made.tokens]
    n_same = n_common(text, tokens)
    if made.story is None:
        said: dict[str, Any] = {
            "turns": [*header["turns"][: made.n_turns], made.turn],
            "kept": made.kept,
        }
    else:
        notes = dict(made.story["notes"])
        notes["text"] = header["notes"].get("text", "")[: made.n_characters] + notes["text"]
        said = {**made.story, "notes": notes}
    return {
        **header,
        **said,
        # a state that covers more is one of another text: all is read again
        "cached": header["cached"] if header["cached"] <= n_same else 0,
        "pins": [pin for pin in header["pins"] if pin[1] <= n_same],
        "forgotten": [gone for gone in header.get("forgotten", ()) if gone[1] <= n_same],
    }, text
