"""Resume saved conversations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.sessions.chats import open_chats
from pyh2o.sessions.database import Database

from ..terminal.terminal import terminal
from ..terminal.wording import count, shortened
from .answers import say_unread
from .input import PROMPT

if TYPE_CHECKING:
    from .loop import Chat


def open_conversation(chat: Chat, saved: int | Path) -> None:
    """Load a saved conversation into a chat, which stores it there if it is saved.

    Args:
        chat: the chat.
        saved: id in the chats database, or a session file.

    Raises:
        SessionError: the file does not exist or is damaged.
    """
    # Imported here because it loads llama.cpp, which would delay `--help`.
    from pyh2o.sessions.conversation import Conversation

    llm = chat.conversation.llm
    with chat.answers.safe_interrupts():
        if isinstance(saved, Path):
            chat.conversation = Conversation.load(saved, llm)
            return
        with chat_database(chat) as database:
            chat.conversation = Conversation.open(database, saved, llm)
        if not chat.autosave.enabled:
            chat.conversation.place = None


def chat_database(chat: Chat) -> AbstractContextManager[Database]:
    """Return the open database, or open it if this chat is not saved."""
    database = chat.autosave.database
    return open_chats() if database is None else nullcontext(database)


def say_last_exchange(chat: Chat) -> None:
    """Show size and last turn of a resumed conversation."""
    say_unread(chat.conversation, chat.answers.all, chat.conversation.reread_reason)
    turns = chat.conversation.turns
    size = f"{count(len(turns), 'turn')}, {count(turns[-1].end if turns else 0, 'token')}"
    terminal.say(f"continuing a conversation of {size}", style="dim")
    if turns and chat.source.interactive:
        last = turns[-1]
        terminal.say(f"{PROMPT}{shortened(last.user)}\n{last.answer.rstrip()}", style="dim")
