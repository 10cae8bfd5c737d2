"""Abort callbacks for tests."""

from __future__ import annotations


class StopError(Exception):
    """The exception that a test aborts with."""


class Countdown:
    """Aborts at the nth call."""

    def __init__(self, n_asked: int) -> None:
        self.n_left = n_asked

    def __call__(self) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise StopError
