"""Where the lines of a chat come from: a person at a terminal, or a script."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.sessions.saved import make_chats_folder

from ..errors import InputError

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import Output

    from .command_table import Command

PROMPT = "> "
MORE = "  "
"""In front of every further line of a message."""
GOES_ON = "\\"
"""At the end of a line: the message goes on in the next one."""
QUOTE = '"""'
END_OF_QUOTE = re.compile(r'"""\s*\Z')


class Dropped(Exception):  # noqa: N818  # nothing went wrong
    """A person dropped the line that was asked for."""


class Source(ABC):
    """Where lines come from.

    Attributes:
        interactive: whether a person is asked.
    """

    interactive: bool

    @abstractmethod
    def read(self, prompt: str = PROMPT, default: str = "", *, verbatim: bool = False) -> str:
        """The next line, or several: what is typed or pasted at once, and what a `\\` joins.

        Args:
            prompt: what a person sees in front of it.
            default: text that a person can edit.
            verbatim: a backslash at the end is a backslash.

        Raises:
            EOFError: there are no more.
            Dropped: a person pressed Ctrl-C.
            InputError: a line that is not UTF-8.
        """

    def read_quoted(self, first: str) -> str:
        """The text between two `\"\"\"`, the first of which begins the line `first`.

        Raises:
            InputError: the second is missing.
        """
        text = first.strip().removeprefix(QUOTE)
        while not (end := END_OF_QUOTE.search(text)):
            try:
                text += "\n" + self.read(MORE, verbatim=True)
            except EOFError:
                raise InputError(f"the input ended before {QUOTE}: nothing was sent") from None
        return text[: end.start()].strip("\n")


class ScriptSource(Source):
    """Plain lines of standard input."""

    interactive = False

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = enumerate(lines, start=1)

    def read(self, prompt: str = PROMPT, default: str = "", *, verbatim: bool = False) -> str:
        """The next line; nobody sees `prompt` and `default`."""
        line = self._next()
        while line.endswith(GOES_ON) and not verbatim:
            line = line.removesuffix(GOES_ON)
            with contextlib.suppress(EOFError):
                line += "\n" + self._next()
        return line

    def _next(self) -> str:
        number, line = next(self._lines, (0, b""))
        if not number:
            raise EOFError
        try:
            return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InputError(f"line {number} of standard input is not UTF-8 text") from None


class TerminalSource(Source):
    """Lines typed by a person, with history, editing and completion.

    Args:
        commands: of the chat, which TAB completes.
        history: a file for the lines typed, or None to forget them.
        keys, screen: other ends than the terminal of the program, for tests.
    """

    interactive = True

    def __init__(
        self,
        commands: Mapping[str, Command],
        history: Path | None,
        keys: Input | None = None,
        screen: Output | None = None,
    ) -> None:
        # Imported here because it takes a moment that a script need not wait for.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output
        from prompt_toolkit.shortcuts import CompleteStyle

        if screen is None:
            # stdout may be a file, which must hold the text only.
            screen = create_output(sys.stderr if sys.stderr.isatty() else sys.stdout)
        self._verbatim = False
        self._session: PromptSession[str] = PromptSession(
            completer=command_completer(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            history=_history(history),
            key_bindings=self._key_bindings(),
            multiline=True,
            enable_suspend=True,
            prompt_continuation=MORE,
            input=keys,
            output=screen,
        )

    def read(self, prompt: str = PROMPT, default: str = "", *, verbatim: bool = False) -> str:
        """What is typed until Enter."""
        self._verbatim = verbatim
        try:
            typed: str = self._session.prompt(prompt, default=default)
        except KeyboardInterrupt:
            raise Dropped from None
        # What the terminal sent may be no UTF-8.
        return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _key_bindings(self) -> KeyBindings:
        """Enter sends the message; Alt-Enter, or a backslash before Enter, begins a new line."""
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        bindings = KeyBindings()

        @bindings.add("enter")
        def enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            goes_on = buffer.text.endswith(GOES_ON) and not self._verbatim
            if goes_on and buffer.document.is_cursor_at_the_end:
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @bindings.add("escape", "enter")
        def alt_enter(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return bindings


def open_source(commands: Mapping[str, Command], *, keep_history: bool) -> Source:
    """Standard input as it is: with a person at it, or not."""
    if not sys.stdin.isatty() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return ScriptSource(sys.stdin.buffer)
    return TerminalSource(commands, _history_path() if keep_history else None)


def _history_path() -> Path | None:
    """The file of the lines typed in all chats, if there can be one."""
    with contextlib.suppress(OSError):
        path = make_chats_folder() / ".history"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return path
    return None


def _history(path: Path | None) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class LastingHistory(FileHistory):
        """A history whose file may become unwritable without ending the chat."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

        def load_history_strings(self) -> Iterable[str]:
            with contextlib.suppress(OSError):
                return super().load_history_strings()
            return []

    return InMemoryHistory() if path is None else LastingHistory(str(path))


def command_completer(commands: Mapping[str, Command]) -> Completer:
    """What TAB offers on a line that begins with a slash: commands, their words, and files."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            line = document.text_before_cursor
            name, space, argument = line.partition(" ")
            command = commands.get(name)
            if not space:
                words: Iterable[str] = commands if line.startswith("/") else ()
            else:
                words = command.words(argument) if command else ()
            typed = argument if space else name
            for word in words:
                if word.startswith(typed):
                    yield Completion(word, start_position=-len(typed))
            if space and command and "FILE" in command.argument:
                yield from files.get_completions(Document(argument.lstrip()), event)

    return CommandCompleter()
