"""The one place that turns errors into a line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pyh2o.errors import PyH2OError

from .terminal.terminal import silence, terminal

EXIT_ERROR = 1
# As a shell reports a program ended by SIGINT (128 + 2) and by SIGPIPE (128 + 13).
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class InputError(PyH2OError, ValueError):
    """A prompt, an output file or an address that cannot be used."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Run a command: an expected error becomes one line and an exit code, never a traceback."""
    try:
        yield
    except BrokenPipeError:
        # The reader has gone (`| head`): nobody is left to tell, and nothing went wrong here.
        silence(sys.stdout)
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except KeyboardInterrupt:
        terminal.say("stopped by Ctrl-C")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (PyH2OError, OSError, MemoryError) as error:
        say_error(error)
        raise typer.Exit(EXIT_ERROR) from None


def say_error(error: Exception) -> None:
    """Show an error as one line."""
    terminal.say(f"error: {one_line(error)}", style="red")


def one_line(error: Exception) -> str:
    """The message of an error without line breaks."""
    if isinstance(error, MemoryError):
        return "out of memory: use a smaller --ctx, or --kv-type q8_0"
    if isinstance(error, FileNotFoundError) and error.strerror and not error.filename:
        return "the current folder is gone: change to another one"  # os.getcwd() names no file
    if isinstance(error, OSError) and not isinstance(error, PyH2OError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
