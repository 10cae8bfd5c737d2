"""What breaks batches off in tests."""

from __future__ import annotations


class StopError(Exception):
    """What a test breaks off with."""


class Countdown:
    """Breaks off when it is asked for the nth time."""

    def __init__(self, n_asked: int) -> None:
        self.n_left = n_asked

    def __call__(self) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise StopError
