"""The table of a chat's commands: the help and the work of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import cleandoc
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from .loop import Chat


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
    run: Callable[[Chat, str], None]
    words: Callable[[str], Iterable[str]]

    @property
    def usage(self) -> str:
        """The command as it is typed."""
        return f"{self.name} {self.argument}".rstrip()

    @property
    def help(self) -> tuple[str, str]:
        """One line for /help, and more for /help NAME."""
        summary, _, details = cleandoc(self.run.__doc__ or "").partition("\n\n")
        return summary[:1].lower() + summary[1:].removesuffix("."), " ".join(details.split())


class Commands(dict[str, Command]):
    """Commands by their names, in the order in which /help shows them.

    Args:
        aliases: other names, and the names that they stand for.
    """

    def __init__(self, aliases: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._aliases = aliases or {}

    def add(
        self, name: str, argument: str = "", *, words: Callable[[str], Iterable[str]] = lambda _: ()
    ) -> Callable[[Callable[[Chat, str], None]], None]:
        """Put the function below into the table; the arguments are those of `Command`."""

        def add(run: Callable[[Chat, str], None]) -> None:
            self[name] = Command(name, argument, run, words)

        return add

    def find(self, name: str, message: str) -> Command:
        """The command of a name with its slash, or of an alias."""
        found = self.get(self._aliases.get(name, name))
        if found is None:
            close = get_close_matches(name.lower(), self, n=1)
            hint = f"did you mean {close[0]}?" if close else "/help lists the commands;"
            raise InputError(message.format(name, hint).rstrip(";"))
        return found

    def run(self, chat: Chat, line: str) -> None:
        """Do what a line says that begins with a slash."""
        name, argument = (*line.split(maxsplit=1), "")[:2]
        argument = argument.strip()
        unknown = "unknown command {}: {} begin the line with a space to send it to the model"
        found = self.find(name, unknown)
        if argument and not found.argument:
            raise InputError(f"{found.name} stands alone: /help {found.name[1:]} explains it")
        if not argument and found.argument and found.argument[0] != "[":
            raise InputError(f"{found.name} needs more: {found.usage}")
        found.run(chat, argument)
