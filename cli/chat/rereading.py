"""What a person is asked and told where the text of a conversation is read again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.errors import OtherSettingsError
from pyh2o.text.cache_copies import WORTH

from ..errors import one_line
from ..terminal.terminal import terminal
from ..terminal.wording import count, duration
from .input import Dropped, Source

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation
    from pyh2o.sessions.saved import SavedChat


def say_recompute(tokens: int) -> None:
    """Say that text is read once more, if that takes a while."""
    if tokens >= WORTH:
        terminal.say(f"reading {count(tokens, 'token')} again", style="dim")


def say_unread(conversation: Conversation) -> None:
    """Say what of a text that was changed is read again, but for the newest token of an answer."""
    n_unread = len(conversation.unread)
    if conversation.turns and n_unread > 1:
        terminal.say(f"{count(n_unread, 'token')} will be read again with the next message")


def is_wanted(
    error: OtherSettingsError, path: Path, source: Source, seconds_per_token: float | None = None
) -> bool:
    """Ask a person whether a text shall be read again; nobody wants it where none can be asked.

    Args:
        error: why it would have to be.
        path: the session file.
        source: of the person's answer.
        seconds_per_token: how long the reading takes, if that is known.

    Raises:
        SessionError: the file is damaged.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.saved_conversation import read_saved_conversation

    if not source.interactive:
        return False
    turns = read_saved_conversation(path).turns
    n_tokens = turns[-1].end if turns else 0
    tokens, cause = count(n_tokens, "token"), one_line(error).partition(": ")[0]
    takes = _about(n_tokens, seconds_per_token)
    takes = f", which takes {takes}" if takes else ""
    try:
        answer = source.read(f"{cause}. Read its {tokens} again{takes}? [y/N] ")
    except (Dropped, EOFError):
        return False
    return answer.strip().lower() in ("y", "yes")


def say_reread(
    conversation: Conversation, before: SavedChat | None, seconds_per_token: float | None = None
) -> None:
    """Say what it costs that a text will be read again, and where it is kept as it was.

    Args:
        conversation: with that text.
        before: the name that its session will have; None if it stays where it is.
        seconds_per_token: as for `is_wanted`.
    """
    n_tokens = len(conversation.unread)
    takes = _about(n_tokens, seconds_per_token)
    takes = f" ({takes})" if takes else ""
    kept = f"; once it is saved anew, {before.name} is the session as it was" if before else ""
    again = f"{count(n_tokens, 'token')} will be read again with the next message"
    terminal.say(f"{again}{takes}{kept}", style="dim")


def _about(n_tokens: int, seconds_per_token: float | None) -> str:
    """How long the reading takes, in words; "" where nobody knows."""
    return "" if seconds_per_token is None else f"about {duration(n_tokens * seconds_per_token)}"
