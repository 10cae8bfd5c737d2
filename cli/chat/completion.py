"""What TAB offers in a chat: commands, their words, and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from pyh2o.generation.sampling import Sampling

from ..shell_completion import complete_session
from .commands import COMMANDS


class CommandCompleter(Completer):
    """Completes lines that begin with a slash."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """What can stand where the cursor is."""
        line = document.text_before_cursor
        name, space, argument = line.partition(" ")
        command = COMMANDS.get(name)
        if space and command and command.name == "/load":
            for saved in complete_session(argument):
                yield Completion(saved, start_position=-len(argument))
        if space and command and command.takes_file:
            yield from self._files.get_completions(Document(argument.lstrip()), event)
        elif line.startswith("/"):
            typed = argument if space else name
            for word in words(name) if space else COMMANDS:
                if word.startswith(typed):
                    yield Completion(word, start_position=-len(typed))


def words(command: str) -> Iterator[str]:
    """The words that can follow a command."""
    if command == "/help":
        yield from (name.removeprefix("/") for name in COMMANDS)
    elif command == "/kv":
        yield "all"
    elif command == "/set":
        yield from (field.name for field in dataclasses.fields(Sampling))
