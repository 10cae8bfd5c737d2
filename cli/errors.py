"""Report errors as a line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pyh2o.errors import PyH2OError

from .terminal.terminal import silence, terminal

EXIT_ERROR = 1
# As shells report programs ended by SIGINT (128 + 2) and SIGPIPE (128 + 13).
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class InputError(PyH2OError, ValueError):
    """An invalid prompt, output file or address."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Report expected errors inside the block as one line and an exit code."""
    try:
        yield
    except BrokenPipeError:
        # the reader has closed the pipe (`| head`), which is not an error
        silence(sys.stdout)
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except KeyboardInterrupt:
        terminal.say("stopped by Ctrl-C")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (PyH2OError, OSError, MemoryError) as error:
        say_error(error)
        raise typer.Exit(EXIT_ERROR) from None


def say_error(error: Exception) -> None:
    terminal.say(f"error: {one_line(error)}", style="red")


def one_line(error: Exception) -> str:
    """Return the message of an error without line breaks."""
    if isinstance(error, MemoryError):
        return "out of memory: use a smaller --ctx, or --kv-type q8_0"
    if isinstance(error, FileNotFoundError) and error.strerror and not error.filename:
        return "the current folder was removed: change to another one"  # from os.getcwd()
    if isinstance(error, OSError) and not isinstance(error, PyH2OError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
