"""How a chat comes to a conversation that is saved: it is loaded, or its text is read again."""

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
    """Go on with a saved conversation.

    If the chat is not saved, the file of its archive is left as it is.

    Args:
        chat: which gets the conversation.
        path: its file.
        reread: whether to read its text again.
        cure: how to say that, for an error.

    Raises:
        InputError: model or settings were others, and the text shall not be read again.
        SessionError: there is no such file, or it is damaged.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.conversation import Conversation

    llm = chat.conversation.llm
    try:
        with chat.answers.undisturbed():
            chat.conversation = Conversation.load(path, llm, reread=reread)
    except OtherSettingsError as error:
        raise InputError(f"{one_line(error)}; or have its text read again{cure}") from None
    if not reread and not chat.autosave.enabled:
        _leave_archive_alone(llm)


def say_last_exchange(chat: Chat, *, is_reread: bool) -> None:
    """Show what a conversation that is gone on with was about."""
    if is_reread:
        _say_reread(chat)
    else:
        say_unread(chat.conversation)
    chat.say_trouble()
    turns = chat.conversation.turns
    said = f"{count(len(turns), 'turn')}, {count(turns[-1].end if turns else 0, 'token')}"
    terminal.say(f"continuing a conversation of {said}", style="dim")
    if turns and chat.source.interactive:
        last = turns[-1]
        terminal.say(f"{PROMPT}{shortened(last.user)}\n{last.answer.rstrip()}", style="dim")


def _leave_archive_alone(llm: Text) -> None:
    """Go on in a copy of the archive's file that has no name and ends with the program.

    For a text that is not saved: nothing that is said from now on may stay on the disk.
    """
    if llm.archive is None or not llm.archive.is_of_session:
        return
    llm.load_kv_state(llm.kv_state(), llm.tokens.tolist())  # makes the copy
    llm.archive.remove_unsaved()


def _say_reread(chat: Chat) -> None:
    """Say that the text will be read again, and where it is kept as it was."""
    before = chat.autosave.keep_before()
    kept = f"; once it is saved anew, {before.name} is the session as it was" if before else ""
    again = f"{count(len(chat.conversation.unread), 'token')} will be read again"
    terminal.say(f"{again} with the next message{kept}", style="dim")
