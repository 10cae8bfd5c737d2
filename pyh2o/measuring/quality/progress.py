"""What a measurement tells about itself while it goes on."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what goes on, in units of work of the same size."""

    def plan(self, total: int) -> None:
        """So much will be done."""

    def advance(self, label: str, amount: int) -> None:
        """So much more of it is done."""

    def extra(self, label: str, done: int, total: int) -> None:
        """Work outside the plan."""

    def note(self, text: str) -> None:
        """Something that the user should know now."""
