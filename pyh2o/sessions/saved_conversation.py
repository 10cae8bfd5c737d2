"""What the header of a conversation's session file says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..generation.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_TRAINED_CONTEXT,
)
from ..generation.sampling import Sampling
from .places import Places
from .session_file import Session
from .turns import Turn

FINISHES = (FINISH_STOP, FINISH_LENGTH, FINISH_INTERRUPTED, FINISH_TRAINED_CONTEXT)


@dataclass(frozen=True)
class SavedConversation:
    """What the header of a conversation's file says.

    Attributes:
        system, sampling, places, turns: as in the conversation.
        n_cached: tokens that the state of the cache covers.
        n_known: tokens behind them that had been evaluated before.
        n_empty: answers in a row that had no text.
    """

    system: str | None
    sampling: Sampling
    places: Places
    turns: tuple[Turn, ...]
    n_cached: int
    n_known: int
    n_empty: int

    @classmethod
    def of(cls, session: Session) -> SavedConversation:
        """Read a header, which somebody may have edited.

        Raises:
            TypeError, ValueError, KeyError: it makes no sense.
        """
        header = session.header
        for name in ("system", "sampling", "places", "turns", "cached", "known", "empty"):
            _expect(name in header, f"it has no {name}")
        system = header["system"]
        _expect(system is None or isinstance(system, str), "its system prompt is no text")
        n_text = len(session.tokens)
        n_cached = _count(header, "cached", n_text)
        n_known = _count(header, "known", n_text - n_cached)
        n_empty = _count(header, "empty", 2**31)
        turns = tuple(_turn(turn) for turn in header["turns"])
        places = [place for turn in turns for place in (turn.start, turn.answer_start, turn.end)]
        _expect(places == sorted(places), "its turns overlap")
        _expect(not turns or turns[-1].end == n_text, "its turns are not its text")
        sampling, shares = Sampling(**header["sampling"]), Places(**header["places"])
        _expect(all(type(share) is bool for share in asdict(shares).values()), "its places are odd")
        return cls(system, sampling, shares, turns, n_cached, n_known, n_empty)


def _turn(data: dict[str, Any]) -> Turn:
    turn = Turn(**data)
    for name in ("user", "answer", "finish"):
        _expect(isinstance(data[name], str), f"{name} of a turn is no text")
    for name in ("start", "answer_start", "end", "attempt"):
        _count(data, name, 2**31)
    _expect(turn.finish in FINISHES, f"the answer of a turn ended by {turn.finish!r}")
    _expect(turn.start < turn.answer_start < turn.end, "a turn has no message or no answer")
    return turn


def _count(data: dict[str, Any], name: str, most: int) -> int:
    value = data[name]
    is_count = isinstance(value, int) and not isinstance(value, bool)
    _expect(is_count and 0 <= value <= most, f"{name} is {value!r}")
    return int(value)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
