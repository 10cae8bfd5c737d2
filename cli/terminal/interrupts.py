"""Ctrl-C as a request that is granted at a safe place."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """A context manager in which Ctrl-C only counts; `check` is where it takes effect.

    An exception in the middle of a step could leave the cache and the record of its tokens apart.
    A second Ctrl-C does not wait. A program that was started to ignore Ctrl-C goes on ignoring it.

    Attributes:
        presses: how often Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.presses = 0
        self._before = signal.getsignal(signal.SIGINT)

    def check(self) -> None:
        """A safe place: a KeyboardInterrupt if Ctrl-C was pressed."""
        if self.presses:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self.presses = 0
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pressed(self, _signal: int, _frame: FrameType | None) -> None:
        self.presses += 1
        if self.presses > 1:
            raise KeyboardInterrupt
