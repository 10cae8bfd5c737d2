"""Resume saved conversations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.errors import OtherSettingsError

from ..errors import InputError, one_line
from ..terminal.terminal import terminal
from ..terminal.wording import count, shortened
from .answers import say_unread
from .input import PROMPT

if TYPE_CHECKING:
    from pyh2o.core.text import Text

    from .loop import Chat


def open_conversation(chat: Chat, path: Path, *, reread: bool, cure: str) -> None:
    """Load a saved conversation into a chat.

    If the chat is not saved, the archive's file is not changed.

    Args:
        chat: the chat.
        path: the session file.
        reread: whether to read the text again.
        cure: the option for that, for the error message.

    Raises:
        InputError: model or settings differ, and `reread` is False.
        SessionError: the file does not exist or is damaged.
    """
    # Imported here because it loads llama.cpp, which would delay `--help`.
    from pyh2o.sessions.conversation import Conversation

    llm = chat.conversation.llm
    try:
        with chat.answers.safe_interrupts():
            chat.conversation = Conversation.load(path, llm, reread=reread)
    except OtherSettingsError as error:
        raise InputError(f"{one_line(error)}; or read its text again{cure}") from None
    if not reread and not chat.autosave.enabled:
        _leave_archive_alone(llm)


def say_last_exchange(chat: Chat, *, is_reread: bool) -> None:
    """Show size and last turn of a resumed conversation."""
    if is_reread:
        _say_reread(chat)
    else:
        say_unread(chat.conversation)
    chat.say_trouble()
    turns = chat.conversation.turns
    size = f"{count(len(turns), 'turn')}, {count(turns[-1].end if turns else 0, 'token')}"
    terminal.say(f"continuing a conversation of {size}", style="dim")
    if turns and chat.source.interactive:
        last = turns[-1]
        terminal.say(f"{PROMPT}{shortened(last.user)}\n{last.answer.rstrip()}", style="dim")


def _leave_archive_alone(llm: Text) -> None:
    """Switch to an unnamed copy of the archive's file, which is freed when the program ends.

    For a text that is not saved: nothing new may remain on the disk.
    """
    if llm.archive is None or not llm.archive.is_of_session:
        return
    llm.load_kv_state(llm.kv_state(), llm.tokens.tolist())  # makes the copy
    llm.archive.remove_unsaved()


def _say_reread(chat: Chat) -> None:
    """Print that the text will be read again, and the name of the copy."""
    before = chat.autosave.keep_before()
    kept = f"; the next save keeps the current session as {before.name}" if before else ""
    again = f"{count(len(chat.conversation.unread), 'token')} will be read again"
    terminal.say(f"{again} with the next message{kept}", style="dim")
