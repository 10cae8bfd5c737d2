"""Character cards of SillyTavern and others: JSON files, or PNG pictures that contain the JSON."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PyH2OError
from .lorebooks import LoreEntry, entries_of, with_names

PNG = b"\x89PNG\r\n\x1a\n"
# Keywords of PNG text chunks with cards, the newer format first.
CARD_TEXTS = (b"ccv3", b"chara")
DEFAULT_USER = "User"
INSTRUCTION = "You are {{char}}, in a chat with {{user}}. Write what {{char}} says and does next."


@dataclass(frozen=True)
class Character:
    """A character that the model plays.

    Attributes:
        system: the system prompt.
        greeting: the character's first message; "" if the user starts.
        note: author's note, which is inserted repeatedly.
        lore: entries that are inserted when a key matches.
    """

    name: str
    system: str
    greeting: str
    note: str
    lore: tuple[LoreEntry, ...]

    @property
    def opening(self) -> tuple[tuple[str, str], ...]:
        """The first message and answer, for `Conversation.take_over`.

        Chat templates require that a message comes first.
        """
        return ((f"[{self.name} begins the chat.]", self.greeting),) if self.greeting else ()


def read_character(
    path: Path, *, user: str = DEFAULT_USER, instruction: str | None = None
) -> Character:
    """Read a character from a card's file; see `character_of`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PyH2OError(f"cannot read {path}: {error.strerror}") from None
    return character_of(card_in(data, str(path)), str(path), user=user, instruction=instruction)


def character_of(
    card: dict[str, Any],
    source: str,
    *,
    user: str = DEFAULT_USER,
    instruction: str | None = None,
) -> Character:
    """Return the character of a card of version 1, 2 or 3.

    Args:
        card: the decoded JSON.
        source: file name for error messages.
        user: name of the user.
        instruction: first part of the system prompt; None for the default.

    Raises:
        PyH2OError: the card has no name.
    """
    newer = card.get("data")
    data: dict[str, Any] = newer if isinstance(newer, dict) else card
    if not isinstance(data.get("name"), str) or not data["name"].strip():
        raise PyH2OError(f"{source} is not a character card: it has no name")
    name = data["name"].strip()

    def text(field: str, within: Mapping[str, Any] = data) -> str:
        found = within.get(field)
        return with_names(found, name, user).strip() if isinstance(found, str) else ""

    default = with_names(instruction or INSTRUCTION, name, user)
    own = re.sub(r"(?i)\{\{original\}\}", lambda _: default, text("system_prompt"))
    examples = re.sub(r"(?i)\s*<START>\s*", "\n\n", text("mes_example")).strip()
    parts = [
        own or default,
        text("description"),
        _titled(f"{name}'s personality", text("personality")),
        _titled("Scenario", text("scenario")),
        _titled(f"How {name} talks", examples),
    ]
    extensions = data.get("extensions")
    depth = extensions.get("depth_prompt") if isinstance(extensions, dict) else None
    notes = [
        re.sub(r"(?i)\{\{original\}\}", "", text("post_history_instructions")).strip(),
        text("prompt", depth) if isinstance(depth, dict) else "",
    ]
    book = data.get("character_book")
    entries = entries_of(book, source) if isinstance(book, dict) else ()
    return Character(
        name,
        "\n\n".join(part for part in parts if part),
        text("first_mes"),
        "\n\n".join(note for note in notes if note),
        tuple(entry.named(name, user) for entry in entries),
    )


def _titled(title: str, text: str) -> str:
    return f"{title}: {text}" if text else ""


def card_in(data: bytes, source: str) -> dict[str, Any]:
    """Return the decoded JSON of a card's file, which may be a PNG.

    Raises:
        PyH2OError: the file contains no card.
    """
    try:
        card = json.loads((_text_in(data) if data.startswith(PNG) else data).decode("utf-8-sig"))
    except (ValueError, struct.error) as error:  # includes base64 errors
        raise PyH2OError(
            f"{source} is not a character card (PNG or JSON): {' '.join(str(error).split())}"
        ) from None
    if not isinstance(card, dict):
        raise PyH2OError(f"{source} is not a character card: it is not a JSON object")
    return card


def _text_in(picture: bytes) -> bytes:
    """Return the JSON from the text chunks of a PNG; a chunk has length, type, data and checksum.

    Raises:
        ValueError, struct.error: no chunk contains a card, or the picture is truncated.
    """
    found: dict[bytes, bytes] = {}
    at = len(PNG)
    while at < len(picture):
        size, kind = struct.unpack_from(">I4s", picture, at)
        if kind == b"tEXt":
            name, _, text = picture[at + 8 : at + 8 + size].partition(b"\0")
            found[name] = text
        at += size + 12
    for name in CARD_TEXTS:
        if name in found:
            return base64.b64decode(found[name], validate=True)
    raise ValueError("the picture does not contain a card")
