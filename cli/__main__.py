"""The start of the program, also as `python -m pyh2o.cli`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """Entry point of the program."""
    open_closed_streams()
    with ctrl_c_ends_at_once():
        from .app import app
        from .terminal.terminal import replace_unprintable
    replace_unprintable()
    app(prog_name="pyh2o")


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """While modules are imported, a KeyboardInterrupt would end in a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # and not ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


def open_closed_streams() -> None:
    """Open standard streams that the program was started without, as by `>&-` in a shell.

    A file that is opened later would get the number of such a stream, and what is printed.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free. To write a text there fails, and nobody misses notes.
            os.open(os.devnull, flags)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


if __name__ == "__main__":
    main()
