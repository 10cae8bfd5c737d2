"""Handle Ctrl-C at safe places only."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """A context manager that defers Ctrl-C to the next call of `check`.

    An exception within a step could make the cache inconsistent with the record of its tokens. A
    second Ctrl-C raises at once. A program that was started to ignore Ctrl-C continues to do so.
    """

    def __init__(self) -> None:
        self.presses = 0
        self._before = signal.getsignal(signal.SIGINT)

    def check(self) -> None:
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
