"""The two streams of the program: text on stdout, notes on stderr, styled only on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from rich.console import Console

from .wrapping import Wrapping

# A console looks its stream up each time it writes, so redirected streams are followed.
stdout = Console(highlight=False, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)


class Terminal:
    """Keeps text and notes apart where both streams end on one screen."""

    def __init__(self) -> None:
        self._in_line = False
        self._wrapping = Wrapping()

    def write(self, text: str) -> None:
        """Write text to stdout at once, so that a pipe or a screen shows every token.

        Raises:
            BrokenPipeError: the reader has gone.
            OSError: the text cannot be written, such as on a full disk.
        """
        if not text:
            return
        self._in_line = False  # if that fails, there is no line to end
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise stdout_failed(error) from None
        self._in_line = not text.endswith("\n")

    def show(self, text: str) -> None:
        """Write what a model says: as it is, unless it goes to a terminal."""
        if stdout.is_terminal:
            text = self._wrapping.feed(harmless(text), stdout.width)
        self.write(text)

    def end_line(self) -> None:
        """End the line of text begun on stdout, if any."""
        if self._in_line:
            self.write("\n")
        self._wrapping = Wrapping()

    def say(self, note: str, style: str | None = None) -> None:
        """Write a note to stderr, after all text so far.

        One that cannot be written, such as into a log on a full disk, must not stop the work.
        """
        self.end_line()
        with contextlib.suppress(OSError):
            # errors have words of models, files and servers in them
            stderr.print(harmless(note), style=style, soft_wrap=True)


terminal = Terminal()


# All but tab and line break: with the others a text can move the cursor or rename the window.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def harmless(text: str) -> str:
    """The text of a model or a file without what would control a terminal."""
    return text.translate(CONTROLS)


def replace_unprintable() -> None:
    """Let stdout show '?' for characters its encoding lacks; the default is to fail on them."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def open_missing_streams() -> None:
    """Put something where the program was started without one of its streams (`>&-`).

    Else the next file that is opened gets its number, and all that llama.cpp says. Nothing is read,
    notes are dropped, and writing text fails: it would be lost.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            # the lowest number that is free, which is this one
            opened = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def stdout_failed(error: OSError) -> OSError:
    """What to raise if stdout cannot be written: what is left in its buffer is dropped."""
    silence(sys.stdout)  # it would fail again at exit
    return OSError(error.errno, error.strerror, "standard output")


def drop_unwritten_notes() -> None:
    """At the end: notes that could not be written must not make Python's last flush fail."""
    try:
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Point a stream at nothing, so that Python's last flush at exit cannot fail again."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
