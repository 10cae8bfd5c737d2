"""Character cards, as SillyTavern and others write them: JSON, or a picture that has it inside."""

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
# Texts of a picture that are cards, the newer form first.
CARD_TEXTS = (b"ccv3", b"chara")
DEFAULT_USER = "User"
INSTRUCTION = "You are {{char}}, in a chat with {{user}}. Write what {{char}} says and does next."


@dataclass(frozen=True)
class Character:
    """Whom the model plays.

    Attributes:
        name: of the character.
        system: what the model is told first.
        greeting: how the character begins the chat; "" for a person who does.
        note: what the model is told again and again.
        lore: what is told when it comes up.
    """

    name: str
    system: str
    greeting: str
    note: str
    lore: tuple[LoreEntry, ...]

    @property
    def opening(self) -> tuple[tuple[str, str], ...]:
        """The message and the answer that the chat begins with, for `Conversation.take_over`.

        Templates want a message first.
        """
        return ((f"[{self.name} begins the chat.]", self.greeting),) if self.greeting else ()


def read_character(
    path: Path, *, user: str = DEFAULT_USER, instruction: str | None = None
) -> Character:
    """Read a card from a file; otherwise as `character_of`."""
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
    """Whom a card is about: one of version 1, 2 or 3.

    Args:
        card: what its JSON says.
        source: where it is from, for errors.
        user: what the person is called.
        instruction: what the model is told to do, before the card; None for the usual.

    Raises:
        PyH2OError: it is no card.
    """
    newer = card.get("data")
    data: dict[str, Any] = newer if isinstance(newer, dict) else card
    if not isinstance(data.get("name"), str) or not data["name"].strip():
        raise PyH2OError(f"{source} is no character card: it has no name")
    name = data["name"].strip()

    def text(field: str, within: Mapping[str, Any] = data) -> str:
        found = within.get(field)
        return with_names(found, name, user).strip() if isinstance(found, str) else ""

    said = with_names(instruction or INSTRUCTION, name, user)
    own = re.sub(r"(?i)\{\{original\}\}", lambda _: said, text("system_prompt"))
    examples = re.sub(r"(?i)\s*<START>\s*", "\n\n", text("mes_example")).strip()
    parts = [
        own or said,
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
    """The JSON of a card, which may be in a PNG.

    Raises:
        PyH2OError: there is none.
    """
    try:
        card = json.loads((_text_in(data) if data.startswith(PNG) else data).decode("utf-8-sig"))
    except (ValueError, struct.error) as error:  # that of base64, too
        raise PyH2OError(
            f"{source} is no character card, a PNG or JSON: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(card, dict):
        raise PyH2OError(f"{source} is no character card: it is no JSON object")
    return card


def _text_in(picture: bytes) -> bytes:
    """The JSON in a PNG: the texts in it are in chunks of a length, a type, data and a checksum.

    Raises:
        ValueError, struct.error: there is none, or the picture is cut.
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
    raise ValueError("the picture has no card inside")
