"""A saved conversation as it was left, among what was saved after each step of a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyh2o.sessions.headers import CONVERSATION
from pyh2o.sessions.session_file import read_session
from pyh2o.sessions.unfinished import path_beside

State = tuple[Any, ...]


def conversation_state(path: Path) -> State:
    """What a saved conversation says, read without a model; an answer cut off is taken back."""
    read_session(path, CONVERSATION)
    path_beside(path).unlink(missing_ok=True)
    session = read_session(path, CONVERSATION)
    header = session.header
    turns = [(turn["user"], turn["answer"], turn.get("attempt", 0)) for turn in header["turns"]]
    return tuple(turns), tuple(map(tuple, header.get("pins", []))), tuple(session.tokens)


def everything(state: State) -> State:
    """Of a session's state all."""
    return state


def messages(state: State) -> State:
    """Of a session's state what a person has said, and pinned."""
    return tuple(user for user, _, _ in state[0]), state[1]


def steps_done(states: Sequence[State], found: State | None, n_saved: int) -> int:
    """After how many steps a session is as it was found.

    Args:
        states: after each step; /undo leads back to one that was there before.
        found: the session; None if there is none.
        n_saved: steps that were said to be saved.

    Raises:
        AssertionError: some of those are gone, or nobody has saved that.
    """
    if found is None:
        assert n_saved == 0, f"{n_saved} steps were saved, and there is no session"
        return 0
    n_done = [n for n, state in enumerate(states, start=1) if state == found]
    assert n_done, f"nobody has saved that: {found}"
    assert n_done[-1] >= n_saved, f"{n_saved} steps were saved, {n_done[-1]} are there"
    return next(n for n in n_done if n >= n_saved)
