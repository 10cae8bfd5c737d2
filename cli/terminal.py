"""The two streams of the program: text on stdout, notes on stderr, styled only on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys

from rich.console import Console

# The console looks sys.stderr up each time it writes, so redirected streams are followed.
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)


class Terminal:
    """Keeps text and notes apart where both streams end on one screen."""

    def __init__(self) -> None:
        self._in_line = False

    def write(self, text: str) -> None:
        """Write text to stdout at once, so that a pipe or a screen shows every token."""
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """End the line of text begun on stdout, if any."""
        if self._in_line:
            self.write("\n")

    def say(self, note: str, style: str | None = None) -> None:
        """Write one line to stderr, after all text so far; never wrapped or cut."""
        self.end_line()
        stderr.print(note, style=style, soft_wrap=True)


terminal = Terminal()


def replace_unprintable() -> None:
    """Let stdout show '?' for characters its encoding lacks; the default is to fail on them."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def silence_stdout() -> None:
    """Point stdout at nothing, so that Python's last flush at exit cannot fail again."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
