"""Lorebooks and author's notes: texts inserted when a key matches, or every few messages.

They are inserted before a message, or near the start of a story's passage, so that little or
nothing is read again for them. File formats are SillyTavern's (world info), those of character
cards, and koboldcpp's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import PyH2OError
from .turns import Turn

# Turns between two insertions of a note, and number of last turns in which keys are searched.
NOTE_TURNS, KEY_TURNS = 4, 1
# Number of last characters of a story in which keys are searched.
KEY_CHARACTERS = 2000
# SillyTavern's logic of second keys: which of them have to match.
ANY, NOT_ALL, NONE, ALL = range(4)


@dataclass(frozen=True)
class LoreEntry:
    """A text that is inserted when one of its keys matches.

    Attributes:
        keys: words, or regular expressions between slashes.
        content: the text.
        second: second keys; empty for no further condition.
        logic: which second keys have to match, too (see ANY).
        constant: whether it is always inserted.
        order: sort key; the matching entry with the highest is inserted last.
        match_case: whether keys are case-sensitive.
        whole_words: whether keys match whole words only.

    Raises:
        ValueError: invalid regular expression.
    """

    keys: tuple[str, ...]
    content: str
    second: tuple[str, ...] = ()
    logic: int = ANY
    constant: bool = False
    order: float = 0.0
    match_case: bool = False
    whole_words: bool = True

    def __post_init__(self) -> None:
        try:
            for key in (*self.keys, *self.second):
                self._is_in(key, "")
        except re.error as error:
            raise ValueError(f"a key is not a valid regular expression ({error})") from None

    def comes_up(self, text: str) -> bool:
        """Return whether it matches a text."""
        found = [self._is_in(key, text) for key in self.second]
        of_second = {ANY: any(found), NOT_ALL: not all(found), NONE: not any(found)}
        matches = any(self._is_in(key, text) for key in self.keys)
        return self.constant or (matches and (not found or of_second.get(self.logic, all(found))))

    def named(self, character: str, user: str) -> LoreEntry:
        """Return the entry with macros replaced by names."""
        keys, second = (
            tuple(with_names(key, character, user) for key in keys)
            for keys in (self.keys, self.second)
        )
        content = with_names(self.content, character, user)
        return replace(self, keys=keys, second=second, content=content)

    def _is_in(self, key: str, text: str) -> bool:
        pattern = _pattern(key, match_case=self.match_case, whole_words=self.whole_words)
        return bool(pattern.search(text))


def note_for_message(
    message: str, turns: Sequence[Turn], lore: Sequence[LoreEntry], note: str = ""
) -> str:
    """Return the lore and note to insert before a message after these turns; "" for nothing.

    An entry is inserted once, the note repeatedly.
    """
    newest = [text for turn in turns[-KEY_TURNS:] for text in (turn.user, turn.answer)]
    text = "\n".join([*newest, message])
    before = [turn.inserted for turn in turns]
    new = [
        entry.content
        for entry in sorted(lore, key=lambda entry: entry.order)
        if not any(_bracketed(entry.content) in inserted for inserted in before)
        and entry.comes_up(text)
    ]
    is_due = note and not any(_bracketed(note) in inserted for inserted in before[-NOTE_TURNS:])
    return "\n\n".join(_bracketed(each) for each in [*new, *([note] if is_due else [])])


def note_for_passage(text: str, lore: Sequence[LoreEntry], note: str = "") -> str:
    """Return the lore and note to insert before the next passage of a story; "" for nothing."""
    newest = text[-KEY_CHARACTERS:]
    found = [e.content for e in sorted(lore, key=lambda e: e.order) if e.comes_up(newest)]
    notes = [] if not note else [note if note.startswith("[") else f"Author's note: {note}"]
    return "\n".join(map(_bracketed, [*found, *notes]))


def _bracketed(text: str) -> str:
    return text if text.startswith("[") else f"[{text}]"


def with_names(text: str, character: str, user: str) -> str:
    """Return a text with macros replaced by names, and without comments."""
    names = {"char": character, "bot": character, "user": user}
    text = re.sub(r"\{\{//.*?\}\}", "", text, flags=re.DOTALL)
    return re.sub(
        r"(?i)\{\{(char|user)\}\}|<(bot|char|user)>",
        lambda found: names[(found[1] or found[2]).lower()],
        text,
    )


@lru_cache(1000)
def _pattern(key: str, *, match_case: bool, whole_words: bool) -> re.Pattern[str]:
    if written := re.fullmatch(r"/(.+)/([a-z]*)", key, re.DOTALL):
        return re.compile(written[1], re.IGNORECASE if "i" in written[2] else 0)
    flags = 0 if match_case else re.IGNORECASE
    pattern = r"\s+".join(map(re.escape, key.split()))
    # some scripts have no spaces between words
    return re.compile(
        rf"(?<!\w){pattern}(?!\w)" if whole_words and key.isascii() else pattern, flags
    )


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------


def read_lorebook(path: Path, *, character: str, user: str) -> tuple[LoreEntry, ...]:
    """Read the entries of a file, with macros replaced by names.

    Raises:
        PyH2OError: the file cannot be read, or is not a lorebook.
    """
    try:
        book = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise PyH2OError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise PyH2OError(f"{path} is not a lorebook: {' '.join(str(error).split())}") from None
    return tuple(entry.named(character, user) for entry in entries_of(book, str(path)))


def entries_of(book: object, source: str) -> tuple[LoreEntry, ...]:
    """Return the entries of a lorebook from its file or a card.

    Args:
        book: the decoded JSON.
        source: file name for error messages.

    Raises:
        PyH2OError: it is not a lorebook.
    """
    if isinstance(book, dict) and isinstance(book.get("data"), dict):
        book = book["data"]
    found = book.get("entries", book.get("worldinfo")) if isinstance(book, dict) else None
    found = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise PyH2OError(f"{source} is not a lorebook: it has no entries")
    return tuple(_entries(found, source))


def _entries(found: Sequence[dict[str, Any]], source: str) -> Iterator[LoreEntry]:
    """Yield the enabled entries that have content."""
    for number, given in enumerate(found):
        more = given.get("extensions")
        fields = {**(more if isinstance(more, dict) else {}), **given}

        def first(*names: str, fields: dict[str, Any] = fields) -> Any:
            return next((fields[name] for name in names if fields.get(name) is not None), None)

        content = first("content")
        if not isinstance(content, str) or not content.strip():
            continue
        if first("enabled") is False or first("disable", "widisabled"):
            continue
        is_selective = first("selective") is not False
        second = _keys(first("keysecondary", "secondary_keys")) if is_selective else ()
        unless = _keys(first("keyanti"))
        logic = first("selectiveLogic", "selective_logic")
        order = first("order", "insertion_order")
        try:
            yield LoreEntry(
                _keys(first("key", "keys")),
                content.strip(),
                second or unless,
                NONE if unless and not second else logic if isinstance(logic, int) else ANY,
                constant=bool(first("constant")),
                order=float(order if isinstance(order, int | float) else number),
                match_case=bool(first("caseSensitive", "case_sensitive")),
                whole_words=first("matchWholeWords", "match_whole_words") is not False,
            )
        except ValueError as error:
            raise PyH2OError(f"{source}: {error}") from None


def _keys(given: object) -> tuple[str, ...]:
    """Return keys from a list or a comma-separated string."""
    keys = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else ()
    return tuple(key.strip() for key in keys if isinstance(key, str) and key.strip())
