"""Where the lines of a chat come from: a person at a terminal, or a script."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

from ..errors import InputError

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

    def ask(self, question: str) -> str:
        """The answer to a question; raises what `read` does."""
        return self.read(question)

    def read_quoted(self, first: str) -> str:
        """The text between two `\"\"\"`, the first of which begins the line `first`."""
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
