"""How a chat comes to a conversation that is saved: it is loaded, or its text is read again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.errors import OtherSettingsError

from ..errors import InputError, one_line
from ..terminal.terminal import harmless, terminal
from ..terminal.wording import count, duration, excerpt
from .input import PROMPT, Dropped

if TYPE_CHECKING:
    from pyh2o.core.text import Text
    from pyh2o.sessions.conversation import Conversation

    from .loop import Chat


def open_conversation(chat: Chat, path: Path, *, reread: bool, cure: str) -> bool:
    """Go on with a saved conversation.

    A person is asked whether its text shall be read again where model or settings were others. If
    the chat is not saved, the file of its archive is left as it is.

    Args:
        chat: which gets the conversation.
        path: its file.
        reread: whether to read its text again without asking.
        cure: how to say that, for an error.

    Returns:
        Whether its text will be read again.

    Raises:
        InputError: model or settings were others, and the text shall not be read again.
        SessionError: there is no such file, or it is damaged.
    """
    # Imported here, as below, because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.conversation import Conversation

    llm, mib = chat.conversation.llm, chat.conversation.copies.mib

    def load(**how: bool) -> Conversation:
        with chat.answers.undisturbed():
            return Conversation.load(path, llm, copies_mib=mib, **how)

    if not reread:
        try:
            chat.conversation = load()
        except OtherSettingsError as error:
            if not _is_wanted(error, path, chat):
                raise InputError(f"{one_line(error)}; or have its text read again{cure}") from None
            reread = True
        else:
            if not chat.autosave.enabled:
                _leave_archive_alone(llm)
    if reread:
        chat.conversation = load(reread=True)
    chat.fading_said = llm.kv.tokens_evicted > 0
    return reread


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
        exchange = harmless(f"{PROMPT}{excerpt(last.user)}\n{excerpt(last.answer.rstrip())}")
        terminal.say(exchange, style="dim")


def _is_wanted(error: OtherSettingsError, path: Path, chat: Chat) -> bool:
    """Ask a person whether a text shall be read again; nobody wants it where none can be asked."""
    from pyh2o.sessions.headers import SavedConversation, read_header

    if not chat.source.interactive:
        return False
    turns = read_header(path, SavedConversation).turns
    n_tokens = turns[-1].end if turns else 0
    cause, takes = one_line(error).partition(": ")[0], _about(n_tokens, chat)
    takes = f", which takes {takes}" if takes else ""
    try:
        answer = chat.source.read(
            f"{cause}. Read its {count(n_tokens, 'token')} again{takes}? [y/N] "
        )
    except (Dropped, EOFError):
        return False
    return answer.strip().lower() in ("y", "yes")


def _leave_archive_alone(llm: Text) -> None:
    """Go on in a copy of the archive's file that has no name and ends with the program.

    For a text that is not saved: nothing that is said from now on may stay on the disk.
    """
    if llm.archive is None or not llm.archive.is_of_session:
        return
    llm.load_kv_state(llm.kv_state(), llm.tokens.tolist())  # makes the copy
    llm.archive.remove_unsaved()


def say_unread(conversation: Conversation) -> None:
    """Say what of a text that was changed is read again, but for the newest token of an answer."""
    n_unread = len(conversation.unread)
    if conversation.turns and n_unread > 1:
        terminal.say(f"{count(n_unread, 'token')} will be read again with the next message")


def _say_reread(chat: Chat) -> None:
    """Say what it costs that the text will be read again, and where it is kept as it was."""
    n_tokens, before = len(chat.conversation.unread), chat.autosave.keep_before()
    takes = _about(n_tokens, chat)
    takes = f" ({takes})" if takes else ""
    kept = f"; once it is saved anew, {before.name} is the session as it was" if before else ""
    again = f"{count(n_tokens, 'token')} will be read again with the next message"
    terminal.say(f"{again}{takes}{kept}", style="dim")


def _about(n_tokens: int, chat: Chat) -> str:
    """How long the reading takes, in words; "" where nobody knows."""
    seconds = chat.answers.seconds_per_token_read
    return "" if seconds is None else f"about {duration(n_tokens * seconds)}"
