"""Output of the program: text on stdout, notes on stderr, with styles on terminals only."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from rich.console import Console

from .wrapping import Wrapping

# Consoles look up sys.stdout and sys.stderr at each write, so they follow redirection.
stdout = Console(highlight=False, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)


class Terminal:
    """Writes text and notes on separate lines, as both streams may share a screen."""

    def __init__(self) -> None:
        self._in_line = False
        self._wrapping = Wrapping()

    def write(self, text: str) -> None:
        """Write text to stdout and flush it; an OSError names the standard output."""
        if not text:
            return
        self._in_line = False  # if writing fails, there is no line to end
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise stdout_failed(error) from None
        self._in_line = not text.endswith("\n")

    def show(self, text: str) -> None:
        """Write text of a model, wrapped and without control characters on a terminal."""
        if stdout.is_terminal:
            text = self._wrapping.feed(harmless(text), stdout.width)
        self.write(text)

    def end_line(self) -> None:
        """End an incomplete line on stdout, if any."""
        if self._in_line:
            self.write("\n")
        self._wrapping = Wrapping()

    def say(self, note: str, style: str | None = None) -> None:
        """Write a note to stderr, after all text so far.

        A write error, for example a log on a full disk, does not stop the program.
        """
        self.end_line()
        with contextlib.suppress(OSError):
            # notes contain text of models, files and servers
            stderr.print(harmless(note), style=style, soft_wrap=True)


terminal = Terminal()


# All except tab and line break: the others can move the cursor or rename the window.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def harmless(text: str) -> str:
    """Return a text without terminal control characters."""
    return text.translate(CONTROLS)


def replace_unprintable() -> None:
    """Make stdout write '?' for characters that its encoding lacks, instead of failing."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def open_missing_streams() -> None:
    """Open substitutes for standard streams that were closed (`>&-`).

    Otherwise the next opened file would get their number, and llama.cpp's log. Input is empty,
    notes are discarded, and writing text fails, as it would be lost.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            # it gets the lowest free number, which is `number`
            opened = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def stdout_failed(error: OSError) -> OSError:
    """Discard the buffer of stdout after a write error, and return the error to raise."""
    silence(sys.stdout)  # otherwise it would fail again at exit
    return OSError(error.errno, error.strerror, "standard output")


def drop_unwritten_notes() -> None:
    """Discard notes that cannot be written, so that Python's flush at exit does not fail."""
    try:
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that Python's flush at exit does not fail."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
