"""What a measurement says while it goes on, taken down."""

from __future__ import annotations


class Quiet:
    """Takes down what it is told."""

    def __init__(self) -> None:
        self.planned = 0
        self.done = 0
        self.notes: list[str] = []

    def plan(self, total: int) -> None:
        self.planned = total

    def advance(self, label: str, amount: int) -> None:
        assert label
        self.done += amount

    def extra(self, label: str, done: int, total: int) -> None:
        assert 0 < done <= total

    def note(self, text: str) -> None:
        self.notes.append(text)
