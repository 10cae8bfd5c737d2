"""Input of a chat: a user at a terminal, or a script."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

from ..errors import InputError

PROMPT = "> "
MORE = "  "
"""Prompt of the further lines of a message."""
CONTINUATION = "\\"
"""At the end of a line, if the message continues on the next one."""
QUOTE = '"""'
END_OF_QUOTE = re.compile(r'"""\s*\Z')


class Dropped(Exception):  # noqa: N818  # not an error
    """The user pressed Ctrl-C instead of entering a line."""


class Source(ABC):
    """A source of lines.

    Attributes:
        interactive: whether a user types them.
    """

    interactive: bool

    @abstractmethod
    def read(self, prompt: str = PROMPT, default: str = "", *, verbatim: bool = False) -> str:
        """Return the next line, or several that were pasted at once or joined by a final `\\`.

        Args:
            prompt: shown in front of the line.
            default: text for the user to edit.
            verbatim: whether a final backslash has no special meaning.

        Raises:
            EOFError: end of input.
            Dropped: the user pressed Ctrl-C.
            InputError: the line is not UTF-8.
        """

    def ask(self, question: str) -> str:
        """Return the answer to a question; raises as `read`."""
        return self.read(question)

    def read_quoted(self, first: str) -> str:
        """Return the text between two `\"\"\"`; the line `first` starts with the first one."""
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
        """Return the next line; `prompt` and `default` are ignored."""
        line = self._next()
        while line.endswith(CONTINUATION) and not verbatim:
            line = line.removesuffix(CONTINUATION)
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
