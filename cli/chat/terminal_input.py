"""Interactive input of a chat, with history, editing and completion."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from pyh2o.sessions.chats import make_chats_folder

from .command_table import Command
from .input import CONTINUATION, MORE, PROMPT, Dropped, Source


class TerminalSource(Source):
    """Lines typed by the user.

    Args:
        commands: commands for completion.
        history: file for the history; None keeps it in memory.
    """

    interactive = True

    def __init__(self, commands: Mapping[str, Command], history: Path | None) -> None:
        self._verbatim = False
        # stdout may be a file, which must contain only the answers.
        output = create_output(sys.stderr if sys.stderr.isatty() else sys.stdout)
        self._questions: PromptSession[str] = PromptSession(output=output)
        self._session: PromptSession[str] = PromptSession(
            completer=CommandCompleter(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            history=InMemoryHistory() if history is None else LastingHistory(str(history)),
            key_bindings=self._key_bindings(),
            multiline=True,
            enable_suspend=True,
            prompt_continuation=MORE,
            output=output,
        )

    def read(self, prompt: str = PROMPT, default: str = "", *, verbatim: bool = False) -> str:
        """Return the text typed until Enter."""
        self._verbatim = verbatim
        try:
            typed: str = self._session.prompt(prompt, default=default)
        except KeyboardInterrupt:
            raise Dropped from None
        # The terminal may send bytes that are not UTF-8.
        return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def ask(self, question: str) -> str:
        """Return the typed answer, which is not added to the history."""
        try:
            return self._questions.prompt(question)
        except KeyboardInterrupt:
            raise Dropped from None

    def _key_bindings(self) -> KeyBindings:
        """Let Enter send, and Alt-Enter or a backslash before Enter start a new line."""
        bindings = KeyBindings()

        @bindings.add("enter")
        def enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            continues = buffer.text.endswith(CONTINUATION) and not self._verbatim
            if continues and buffer.document.is_cursor_at_the_end:
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @bindings.add("escape", "enter")
        def alt_enter(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return bindings


def history_file() -> Path | None:
    """Return the history file of all chats; None if it is not writable."""
    with contextlib.suppress(OSError):
        path = make_chats_folder() / ".history"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        return path
    return None


class LastingHistory(FileHistory):
    """A history that ignores write errors."""

    def store_string(self, string: str) -> None:
        """Append a line to the file, if it is writable."""
        with contextlib.suppress(OSError):
            super().store_string(string)


class CommandCompleter(Completer):
    """Completes commands, their arguments, and files."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._commands = commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Yield the completions of a line."""
        line = document.text_before_cursor
        name, space, argument = line.partition(" ")
        command = self._commands.get(name)
        if not space:
            words: Iterable[str] = self._commands if line.startswith("/") else ()
        else:
            words = command.words(argument) if command else ()
        typed = argument if space else name
        for word in words:
            if word.startswith(typed):
                yield Completion(word, start_position=-len(typed))
        if space and command and "FILE" in command.argument:
            yield from self._files.get_completions(Document(argument.lstrip()), event)
