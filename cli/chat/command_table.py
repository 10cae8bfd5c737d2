"""The table of chat commands."""

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
        name: name with its slash.
        argument: placeholder of its argument, in brackets if optional; "" for none.
        run: called with the chat and the argument; its docstring is the help.
        words: completions of its argument, for the text typed so far.
    """

    name: str
    argument: str
    run: Work
    words: Callable[[str], Iterable[str]]

    @property
    def usage(self) -> str:
        """Name and argument."""
        return f"{self.name} {self.argument}".rstrip()


class Commands(dict[str, Command]):
    """Commands by name, in the order of /help."""

    def add(
        self, name: str, argument: str = "", *, words: Callable[[str], Iterable[str]] = lambda _: ()
    ) -> Callable[[Work], None]:
        """Return a decorator that adds a function; the arguments are those of `Command`."""

        def add(run: Work) -> None:
            self[name] = Command(name, argument, run, words)

        return add

    def run(self, chat: Any, line: str) -> None:
        """Run the command of a line that starts with a slash."""
        name, argument = (*line.split(maxsplit=1), "")[:2]
        argument = argument.strip()
        found = self.get(name)
        if found is None:
            raise InputError(
                f"unknown command {name}: /help lists the commands; start the line with a space to "
                "send it to the model"
            )
        if argument and not found.argument:
            raise InputError(f"{found.name} takes no argument")
        if not argument and found.argument and found.argument[0] != "[":
            raise InputError(f"{found.name} needs an argument: {found.usage}")
        found.run(chat, argument)
