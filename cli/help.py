"""The commands of the program: their help as people read it, and their errors as one line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from .errors import reported_errors
from .options import CACHE, MODEL, SAMPLING

# Behind the panels of the command itself.
LAST_PANELS = [MODEL, SAMPLING, CACHE]


class _Flags:
    """Options without a value have none in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Group(_Flags, TyperGroup):
    """Commands under one name."""


class Command(_Flags, TyperCommand):
    """A command of the program: what is used most comes first in its help."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # A docstring without the ends of its lines, which are not those of the terminal.
        parts = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(part.split()) for part in parts) or None
        self.params.sort(key=_place)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with reported_errors():
            return super().invoke(ctx)


def _place(param: Any) -> int:
    panel = getattr(param, "rich_help_panel", None)
    return LAST_PANELS.index(panel) + 1 if panel in LAST_PANELS else 0
