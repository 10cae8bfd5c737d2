"""Lorebooks and notes: what the model is told with a message, when it comes up or is due.

It stands in the text before the message, or where a passage of a story begins, so nothing of the
text is read again for it. Files are
those of SillyTavern (world info), of character cards, and of koboldcpp.
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

# A note is told again behind so many turns; in so many of the newest ones keys are looked for.
NOTE_TURNS, KEY_TURNS = 4, 1
# In so many of the newest ones of a story.
KEY_CHARACTERS = 2000
# What SillyTavern calls the ways of second keys: any of them is said, not all, none, all.
ANY, NOT_ALL, NONE, ALL = range(4)


@dataclass(frozen=True)
class LoreEntry:
    """What is told when one of its keys is said.

    Attributes:
        keys: words, or patterns between slashes.
        content: what is told.
        second: other keys, if there are any.
        logic: how many of these have to be said, too (see ANY).
        constant: whether it is told in any case.
        order: of entries that come up at once the one with the highest is told last.
        match_case: whether upper and lower case differ.
        whole_words: whether a key has to be a word of its own.

    Raises:
        ValueError: a pattern is none.
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
            raise ValueError(f"a key is no regular expression ({error})") from None

    def comes_up(self, text: str) -> bool:
        """Whether it is to be told with this text."""
        found = [self._is_in(key, text) for key in self.second]
        of_second = {ANY: any(found), NOT_ALL: not all(found), NONE: not any(found)}
        is_said = any(self._is_in(key, text) for key in self.keys)
        return self.constant or (is_said and (not found or of_second.get(self.logic, all(found))))

    def named(self, character: str, user: str) -> LoreEntry:
        """The entry with these names in the place of macros."""
        keys, second = (
            tuple(with_names(key, character, user) for key in keys)
            for keys in (self.keys, self.second)
        )
        content = with_names(self.content, character, user)
        return replace(self, keys=keys, second=second, content=content)

    def _is_in(self, key: str, text: str) -> bool:
        pattern = _pattern(key, match_case=self.match_case, whole_words=self.whole_words)
        return bool(pattern.search(text))


def told_with(
    message: str, turns: Sequence[Turn], lore: Sequence[LoreEntry], note: str = ""
) -> str:
    """What the model is told before a message that follows these turns; "" for nothing.

    An entry comes in once: then it is in the text. The note comes again and again.
    """
    newest = [text for turn in turns[-KEY_TURNS:] for text in (turn.user, turn.answer)]
    text = "\n".join([*newest, message])
    before = [turn.told for turn in turns]
    new = [
        entry.content
        for entry in sorted(lore, key=lambda entry: entry.order)
        if not any(_noted(entry.content) in told for told in before) and entry.comes_up(text)
    ]
    is_due = note and not any(_noted(note) in told for told in before[-NOTE_TURNS:])
    return "\n\n".join(_noted(each) for each in [*new, *([note] if is_due else [])])


def told_in_story(text: str, lore: Sequence[LoreEntry], note: str = "") -> str:
    """What the model is told where the next passage of a story begins; "" for nothing.

    That are the entries that come up in the newest characters of its text, and the note.
    """
    newest = text[-KEY_CHARACTERS:]
    found = [e.content for e in sorted(lore, key=lambda e: e.order) if e.comes_up(newest)]
    noted = [] if not note else [note if note.startswith("[") else f"Author's note: {note}"]
    return "\n".join(map(_noted, [*found, *noted]))


def _noted(text: str) -> str:
    """A text as what nobody says."""
    return text if text.startswith("[") else f"[{text}]"


def with_names(text: str, character: str, user: str) -> str:
    """A text with names in the place of its macros, and without its comments."""
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
    # not all scripts have spaces between words
    return re.compile(
        rf"(?<!\w){pattern}(?!\w)" if whole_words and key.isascii() else pattern, flags
    )


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------


def read_lorebook(path: Path, *, character: str, user: str) -> tuple[LoreEntry, ...]:
    """The entries of a file, with these names in the place of macros.

    Raises:
        PyH2OError: it cannot be read, or is no lorebook.
    """
    try:
        book = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise PyH2OError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise PyH2OError(f"{path} is no lorebook: {' '.join(str(error).split())}") from None
    return tuple(entry.named(character, user) for entry in entries_of(book, str(path)))


def entries_of(book: object, source: str) -> tuple[LoreEntry, ...]:
    """The entries of a lorebook as its file, or a card, has it.

    Args:
        book: what its JSON says.
        source: where it is from, for errors.

    Raises:
        PyH2OError: it is none.
    """
    if isinstance(book, dict) and isinstance(book.get("data"), dict):
        book = book["data"]
    found = book.get("entries", book.get("worldinfo")) if isinstance(book, dict) else None
    found = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise PyH2OError(f"{source} is no lorebook: it has no entries")
    return tuple(_entries(found, source))


def _entries(found: Sequence[dict[str, Any]], source: str) -> Iterator[LoreEntry]:
    """Those that are turned on and say something."""
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
    """Keys in a list, or with commas between them."""
    keys = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else ()
    return tuple(key.strip() for key in keys if isinstance(key, str) and key.strip())
