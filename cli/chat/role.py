"""The character and lorebooks of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.system.home import expanded

from ..terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.sessions.characters import Character
    from pyh2o.sessions.lorebooks import LoreEntry

    from .loop import Chat


@dataclass(frozen=True)
class Role:
    """The role of the model in a chat.

    Attributes:
        character: character of the card; None without a card.
        lore: lore of the card and the lorebooks.
        system: system prompt; None for the template's default.
    """

    character: Character | None
    lore: tuple[LoreEntry, ...]
    system: str | None

    def start(self, chat: Chat) -> None:
        """Apply the role to a new conversation."""
        talk = chat.conversation
        talk.lore = self.lore
        if self.character is not None:
            talk.note = self.character.note
            if self.character.opening:
                talk.take_over(self.character.opening)
                terminal.show(self.character.greeting)
                terminal.end_line()

    def resume(self, chat: Chat) -> None:
        """Apply the role to a saved conversation."""
        if self.lore:
            chat.change(lambda: setattr(chat.conversation, "lore", self.lore))
        if self.system is not None and self.system != chat.conversation.system:
            chat.set_system(self.system)


def read_role(
    card: Path | None, lorebooks: Sequence[Path], *, user: str, system: str | None
) -> Role:
    """Read a role from files.

    Args:
        card: character card.
        lorebooks: lorebooks, in addition to that of the card.
        user: name of the user.
        system: given system prompt; with a card, the first part of its system prompt.

    Raises:
        PyH2OError: a file cannot be read, or has another format.
    """
    # Imported here because it loads llama.cpp, which would delay `--help`.
    from pyh2o.sessions.characters import read_character
    from pyh2o.sessions.lorebooks import read_lorebook

    character = None
    if card is not None:
        character = read_character(expanded(card), user=user, instruction=system)
        system = character.system
    name = "" if character is None else character.name
    lore = () if character is None else character.lore
    for file in lorebooks:
        lore += read_lorebook(expanded(file), character=name, user=user)
    return Role(character, lore, system)
