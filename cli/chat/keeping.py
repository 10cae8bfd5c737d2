"""The commands of a chat about conversations that are saved: begun, saved, listed and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.errors import SessionError
from pyh2o.sessions.saved import SavedChat, saved_chats

from ..errors import InputError
from ..terminal.terminal import terminal
from ..terminal.wording import count
from .file_arguments import whole_file
from .listing import lines_of, texts_of

if TYPE_CHECKING:
    from .loop import Chat

REREAD = "--reread"
LISTED = 20
"""So many conversations are shown by /sessions."""


def new(chat: Chat, _argument: str) -> None:
    """Begin another conversation, unless that would lose the one so far."""
    if chat.conversation.turns and not chat.autosave.enabled:
        raise InputError(
            "this chat is not saved as it goes: /save FILE saves a copy of it, /clear forgets it"
        )
    chat.clear()


def save(chat: Chat, argument: str) -> None:
    """Save the conversation where it belongs, or a copy of it."""
    if argument:
        path = whole_file(argument)
        chat.save_copy(path)
        terminal.say(f"saved in {path}: /load goes on from here")
    elif not chat.autosave.enabled:
        raise InputError("this chat is not saved as it goes: /save FILE saves a copy of it")
    elif not chat.conversation.turns:
        raise InputError("there is nothing to save yet")
    else:
        chat.autosave.save_now(chat.conversation)
        terminal.say(f"saved as {chat.autosave.name}")


def sessions(chat: Chat, _argument: str) -> None:
    """List what is saved, with numbers for /load."""
    found = saved_chats()
    chat.listed = found[:LISTED]
    for number, line in enumerate(lines_of(texts_of(chat.listed)), start=1):
        this = "  (this one)" if chat.listed[number - 1].name == chat.autosave.name else ""
        terminal.say(f"{number:>2}  {line}{this}")
    if len(found) > LISTED:
        terminal.say(f"and {count(len(found) - LISTED, 'older one')}: pyh2o sessions list")
    terminal.say("/load NAME, or its number here, goes on" if found else "none is saved yet")


def load(chat: Chat, argument: str) -> None:
    """Go on with a file, or with a saved conversation by its name or its number in the list."""
    argument, reread = _without_reread(argument)
    found = _saved(chat, argument)
    try:
        file = whole_file(argument)
    except InputError:  # a name with spaces is not in quotes
        if found is None:
            raise
    else:
        if file.exists() or found is None:
            _load_file(chat, file, found, reread=reread)
            return
    chat.load(found.path, found, reread=reread)
    terminal.say(f"this is session {found.name}")


def _without_reread(argument: str) -> tuple[str, bool]:
    """What is to be loaded, and whether its text may be read again."""
    name, _, last = argument.rpartition(" ")
    return (name.rstrip(), True) if last == REREAD and name.strip() else (argument, False)


def _load_file(chat: Chat, file: Path, found: SavedChat | None, *, reread: bool) -> None:
    if not file.exists():
        raise InputError(f"there is no file {file}, and no such session: /sessions lists them")
    chat.load(file, reread=reread)
    if found is not None:
        terminal.say(f"this is the file {file}, not the session of that name")


def _saved(chat: Chat, argument: str) -> SavedChat | None:
    """The saved conversation of this name, or else of this number."""
    try:
        named = SavedChat(argument)
        if named.path.is_file():
            return named
    except SessionError:  # no name
        return None
    if argument.isdecimal() and 0 < int(argument) <= len(chat.listed):
        return chat.listed[int(argument) - 1]
    return None
