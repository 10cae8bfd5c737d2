"""What a chat has from files: whom the model plays, and what it is told when that comes up."""

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
    """What was given with a chat.

    Attributes:
        character: of the card; None without one.
        lore: of the card and the lorebooks.
        system: what the model is told first; None for its own.
    """

    character: Character | None
    lore: tuple[LoreEntry, ...]
    system: str | None

    def begin(self, chat: Chat) -> None:
        """Begin a conversation so."""
        talk = chat.conversation
        talk.lore = self.lore
        if self.character is not None:
            talk.note = self.character.note
            if self.character.opening:
                talk.take_over(self.character.opening)
                terminal.show(self.character.greeting)
                terminal.end_line()

    def go_on(self, chat: Chat) -> None:
        """Go on so with a conversation that was saved."""
        if self.lore:
            chat.change(lambda: setattr(chat.conversation, "lore", self.lore))
        if self.system is not None and self.system != chat.conversation.system:
            chat.set_system(self.system)


def read_role(
    card: Path | None, lorebooks: Sequence[Path], *, user: str, system: str | None
) -> Role:
    """Read the files.

    Args:
        card: of a character.
        lorebooks: more of what is told when it comes up.
        user: what the person is called.
        system: system prompt that was given; with a card what the model is told to do.

    Raises:
        PyH2OError: one of them cannot be read, or is something else.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
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
