"""The table of a chat's commands: the help and the work of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

# Called with the chat (see `loop`) and the argument.
Work = Callable[[Any, str], None]


@dataclass(frozen=True)
class Command:
    """A command of the chat.

    Attributes:
        name: with its slash.
        argument: how its argument is shown; "" if it takes none, in brackets if it need not be
            given.
        run: does it; called with the chat and the argument. Its docstring is the help.
        words: those that can follow it, for what is typed of them.
    """

    name: str
    argument: str
    run: Work
    words: Callable[[str], Iterable[str]]

    @property
    def usage(self) -> str:
        """The command as it is typed."""
        return f"{self.name} {self.argument}".rstrip()


class Commands(dict[str, Command]):
    """Commands by their names, in the order in which /help shows them."""

    def add(
        self, name: str, argument: str = "", *, words: Callable[[str], Iterable[str]] = lambda _: ()
    ) -> Callable[[Work], None]:
        """Put the function below into the table; the arguments are those of `Command`."""

        def add(run: Work) -> None:
            self[name] = Command(name, argument, run, words)

        return add

    def run(self, chat: Any, line: str) -> None:
        """Do what a line says that begins with a slash."""
        name, argument = (*line.split(maxsplit=1), "")[:2]
        argument = argument.strip()
        found = self.get(name)
        if found is None:
            raise InputError(
                f"unknown command {name}: /help lists the commands; begin the line with a space to "
                "send it to the model"
            )
        if argument and not found.argument:
            raise InputError(f"{found.name} stands alone: leave out what is behind it")
        if not argument and found.argument and found.argument[0] != "[":
            raise InputError(f"{found.name} needs more: {found.usage}")
        found.run(chat, argument)
