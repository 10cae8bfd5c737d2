"""Records of an answer or passage in progress, which survive if the program is killed.

The record is a small file next to the session file, with the message and the answer so far, or the
passage, but no cache. Reading the session includes them, as interrupted; the next save too.
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

from ..core.tokens import n_common
from ..system.files import replacement
from ..writing.finish import FINISH_INTERRUPTED
from .records import Count, record_of

if TYPE_CHECKING:
    from .turns import AnswerRun, Dialogue

SUFFIX = ".unfinished"
# Between two records of an answer.
SECONDS = 2.0


@dataclass(frozen=True)
class Unfinished:
    """The changes of a session since it was saved.

    Turns are undecoded, as their classes need llama.cpp, and lists of sessions do not.

    Attributes:
        session: `sum_of` the tokens in the session file.
        start: number of first tokens of the session that stay.
        tokens: the tokens after them.
        n_turns: number of first turns that stay.
        turn: the turn after them, as in the session's header.
        kept: replaced answers to its message, as in the session's header.
        pictures: files of pictures in the message, in base64, by their hashes.
        story: new fields of a story's header.
        n_characters: number of first characters of the story's text that stay.
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
    """Return the path of a session's record file."""
    return Path(os.path.realpath(session) + SUFFIX)


def sum_of(tokens: Sequence[int]) -> int:
    """Return a checksum of tokens."""
    return zlib.crc32(np.asarray(tokens, "<i4").tobytes())


class Recorder:
    """Records an answer or a passage every few seconds while it is generated."""

    def __init__(
        self,
        session: Path | None,
        tokens: Sequence[int],
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        """Record next to a session file with these tokens and pictures; nothing if it is None."""
        self._path = session and path_beside(session)
        self._sum = sum_of(tokens) if session else 0
        files = pictures if session and pictures else {}
        self._pictures = {key: b64encode(data).decode() for key, data in files.items()}
        self._next = 0.0

    def record(
        self,
        answer: AnswerRun,
        text: list[int],
        start: int,
        dialogue: Dialogue,
        *,
        at_once: bool = False,
    ) -> None:
        """Record an answer, if it is due; the text has changed from token `start` on."""
        if at_once or self.is_due:
            turn = replace(answer.made_turn(len(text)), finish=FINISH_INTERRUPTED)
            self._write(
                text,
                start,
                n_turns=len(dialogue.turns),
                turn=asdict(turn),
                kept=[asdict(each) for each in dialogue.kept],
                pictures=self._pictures,
            )

    @property
    def is_due(self) -> bool:
        """Whether the next record is due."""
        return self._path is not None and time.monotonic() >= self._next

    def record_story(
        self, text: list[int], start: int, story: dict[str, Any], n_characters: int
    ) -> None:
        """Record a passage: the current header and the new text."""
        self._write(text, start, story=story, n_characters=n_characters)

    def _write(self, text: list[int], start: int, **fields: Any) -> None:
        if self._path is None:
            return
        self._next = time.monotonic() + SECONDS
        record = Unfinished(self._sum, start, tuple(text[start:]), **fields)
        with (  # an error does not end the answer: saving it will report the error
            contextlib.suppress(OSError),
            replacement(self._path, prefix=f".{self._path.name}-", mode=0o600) as file,
        ):
            file.write(json.dumps(asdict(record)).encode())


def read_record(session: str | Path) -> Unfinished | None:
    """Return the record of a session; None if there is none."""
    try:
        return record_of(Unfinished, json.loads(path_beside(session).read_bytes()), "record")
    except (OSError, ValueError):
        return None


def pictures_in(record: Unfinished | None) -> dict[str, bytes]:
    """Return the files of pictures in a record, by their hashes."""
    return {key: b64decode(data) for key, data in record.pictures.items()} if record else {}


def with_unfinished(
    record: Unfinished | None, header: dict[str, Any], tokens: list[int]
) -> tuple[dict[str, Any], list[int]]:
    """Return header and tokens of a session with the changes of its record, if they match."""
    if record is None or record.session != sum_of(tokens):
        return header, tokens  # the session was saved after the record
    text = [*tokens[: record.start], *record.tokens]
    n_same = n_common(text, tokens)
    if record.story is None:
        changes: dict[str, Any] = {
            "turns": [*header["turns"][: record.n_turns], record.turn],
            "kept": record.kept,
        }
    else:
        notes = dict(record.story["notes"])
        notes["text"] = header["notes"].get("text", "")[: record.n_characters] + notes["text"]
        changes = {**record.story, "notes": notes}
    return {
        **header,
        **changes,
        # a state of more tokens belongs to another text: all is read again
        "cached": header["cached"] if header["cached"] <= n_same else 0,
        "pins": [pin for pin in header["pins"] if pin[1] <= n_same],
        "forgotten": [span for span in header.get("forgotten", ()) if span[1] <= n_same],
    }, text
