"""The command of a chat about the answers that /regen has replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError
from ..terminal.terminal import terminal
from ..terminal.wording import count, shortened
from .rereading import say_unread

if TYPE_CHECKING:
    from .loop import Chat


def answers(chat: Chat, argument: str) -> None:
    """List the answers to the last message, or have one of them back, by its number in the list."""
    found = chat.conversation.answers
    if not found:
        raise InputError("there is no message yet: type one")
    if not argument:
        sizes = [count(turn.end - turn.answer_start, "token") for turn in found]
        for number, (turn, size) in enumerate(zip(found, sizes, strict=True), start=1):
            mark = "*" if turn == chat.conversation.turns[-1] else " "
            text = shortened(turn.answer)
            terminal.say(f"{mark} {number:>2}  {size:>{max(map(len, sizes))}}  {text}".rstrip())
        return
    if not argument.isdecimal() or not 1 <= int(argument) <= len(found):
        cure = "/answers lists them" if len(found) > 1 else "/regen draws another one"
        there = count(len(found), "answer")
        raise InputError(f"the last message has {there}, and no {shortened(argument)}: {cure}")
    chat.choose(found[int(argument) - 1].attempt)
    say_unread(chat.conversation)
