"""Saved chats as they are listed: when they were changed, how large they are, how they begin."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pyh2o.sessions.saved import SavedChat

from ..terminal.wording import count, shortened

if TYPE_CHECKING:
    from pyh2o.sessions.listing import SavedText


def texts_of(chats: list[SavedChat]) -> list[SavedText]:
    """What the files of the chats say."""
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.listing import read_saved_text

    return [read_saved_text(chat) for chat in chats]


def lines_of(texts: list[SavedText]) -> list[str]:
    """A line for each."""
    width = max((len(text.name) for text in texts), default=0)
    lines: list[str] = []
    for text in texts:
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(text.changed))
        size = f"{text.n_bytes / 1e6:,.1f} MB"
        lines.append(f"{text.name:<{width}}  {changed}  {size:>10}  {_summary(text)}")
    return lines


def _summary(text: SavedText) -> str:
    """How long a conversation is, and how it begins; or how a story does."""
    if text.trouble:
        return text.trouble
    first = f"  {shortened(text.turns[0].user if text.turns else text.text)}"
    what = "a story" if text.kind == "story" else count(len(text.turns), "turn")
    return f"{what:>9}{first.rstrip()}"
