"""The commands of a chat about passages that are never evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..terminal.terminal import terminal
from ..terminal.wording import count, shortened

if TYPE_CHECKING:
    from .loop import Chat


def pin(chat: Chat, argument: str) -> None:
    """Pin the newest passage with these words, and list what is pinned."""
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.passages import pin_sentences, pinned_passages

    if argument:
        chat.change(lambda: pin_sentences(chat.conversation, argument))
    passages = pinned_passages(chat.conversation)
    if not passages:
        terminal.say("nothing is pinned: /pin TEXT keeps the newest passage with these words")
    for passage in passages:
        held = "" if passage.held > 0.995 else f" ({passage.held:.0%} of it is still there)"
        size = count(passage.end - passage.start, "token")
        terminal.say(f"pinned, {size}{held}: {shortened(passage.text)}")


def unpin(chat: Chat, argument: str) -> None:
    """Let what is pinned be evicted again."""
    # Imported here for the same reason as above.
    from pyh2o.sessions.passages import pinned_passages, unpin_passages

    chat.change(lambda: unpin_passages(chat.conversation, argument or None))
    left = len(pinned_passages(chat.conversation))
    terminal.say(
        f"still pinned: {count(left, 'passage')}" if left else "nothing is pinned any more"
    )
