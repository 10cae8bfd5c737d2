"""An answer in the making, beside the session file: what stays of it if the program is killed.

The file has the message and the answer so far, but nothing of the cache: it is small. Whoever reads
the session finds both in it, as an answer that was interrupted; the next save has them, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.beginnings import n_common
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
    """A turn behind the first turns and tokens of a session; lists do without llama.cpp.

    Attributes:
        session: `sum_of` the tokens in the session's file.
        n_turns: so many of its turns stay.
        turn: that comes behind them, as the session's header has it.
        kept: answers to its message that were replaced, likewise.
        start: so many of the session's tokens stay.
        tokens: that come behind them.
    """

    session: int
    n_turns: Count
    turn: dict[str, Any]
    kept: list[dict[str, Any]]
    start: Count
    tokens: tuple[Count, ...]


def path_beside(session: str | Path) -> Path:
    """The file beside that of a session."""
    return Path(os.path.realpath(session) + SUFFIX)


def sum_of(tokens: Sequence[int]) -> int:
    """What tells the texts of sessions apart."""
    return zlib.crc32(np.asarray(tokens, "<i4").tobytes())


class Notes:
    """Writes down an answer while it is drawn, every few seconds."""

    def __init__(self, session: Path | None, tokens: Sequence[int]) -> None:
        """Beside a session that has these tokens; nowhere if it is None."""
        self._path = session and path_beside(session)
        self._sum = sum_of(tokens) if session else 0
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
        """Write it down, if it is time; the text is another one from the token `start` on."""
        if self._path is None or not (at_once or time.monotonic() >= self._next):
            return
        self._next = time.monotonic() + SECONDS
        turn = replace(answer.made_turn(len(text)), finish=FINISH_INTERRUPTED)
        kept = [asdict(each) for each in said.kept]
        tokens = tuple(text[start:])
        made = Unfinished(self._sum, len(said.turns), asdict(turn), kept, start, tokens)
        with (  # the answer goes on without; the end of it is saved, or an error
            contextlib.suppress(OSError),
            replacement(self._path, prefix=f".{self._path.name}-", mode=0o600) as file,
        ):
            file.write(json.dumps(asdict(made)).encode())


def with_unfinished(
    session: str | Path, header: dict[str, Any], tokens: list[int]
) -> tuple[dict[str, Any], list[int]]:
    """Header and tokens of a session with the answer that is noted beside it, if there is one."""
    try:
        made = record_of(Unfinished, json.loads(path_beside(session).read_bytes()), "note")
    except (OSError, ValueError):
        return header, tokens
    if made.session != sum_of(tokens):
        return header, tokens  # it was saved since
    text = [*tokens[: made.start], *made.tokens]
    n_same = n_common(text, tokens)
    return {
        **header,
        "turns": [*header["turns"][: made.n_turns], made.turn],
        "kept": made.kept,
        # a state that covers more is one of another text: all is read again
        "cached": header["cached"] if header["cached"] <= n_same else 0,
        "pins": [pin for pin in header["pins"] if pin[1] <= n_same],
        "forgotten": [gone for gone in header.get("forgotten", ()) if gone[1] <= n_same],
    }, text
