"""Saved chats as they are listed: when they were changed, how large they are, how they begin."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyh2o.sessions.saved import SavedChat

from .terminal.wording import SHORT, count, shortened

if TYPE_CHECKING:
    from pyh2o.sessions.listing import SavedText

TURN, PARAGRAPH = "turn", "paragraph"


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


def found_passages(text: SavedText, words: Sequence[str]) -> list[tuple[str, str]]:
    """The turns of a conversation, or paragraphs of a story, that have all of the words.

    A text that cannot be read has none; the list of all says why it cannot.

    Returns:
        what each is called, such as "turn 2", and the text about one of the words.
    """
    wanted = [" ".join(word.split()).casefold() for word in words]
    found: list[tuple[str, str]] = []
    for name, passage in _passages(text):
        said = " ".join(passage.split())
        if all(word in said.casefold() for word in wanted):
            # folding may change the length of a text, but hardly the place
            place = max(0, said.casefold().find(wanted[0]) - SHORT // 2)
            found.append((name, ("..." if place else "") + shortened(said[place:])))
    return found


def _passages(text: SavedText) -> Iterator[tuple[str, str]]:
    """The parts of a text that are searched, and what they are called."""
    for number, turn in enumerate(text.turns, start=1):
        yield f"{TURN} {number}", f"{turn.user} {turn.answer}"
    for number, paragraph in enumerate(filter(str.strip, text.text.splitlines()), start=1):
        yield f"{PARAGRAPH} {number}", paragraph


def _summary(text: SavedText) -> str:
    """How long a conversation is, and how it begins; or how a story does."""
    if text.trouble:
        return text.trouble
    first = f"  {shortened(text.turns[0].user if text.turns else text.text)}"
    what = "a story" if text.kind == "story" else count(len(text.turns), "turn")
    return f"{what:>9}{first.rstrip()}"
