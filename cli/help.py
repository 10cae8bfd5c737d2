"""The commands of the program: their help as people read it, and their errors as one line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from .errors import reported_errors
from .options import CACHE, MODEL, SAMPLING

# Behind the panels of the command itself.
LAST_PANELS = [MODEL, SAMPLING, CACHE]
# How the values of options are called; others, such as choices, stay as they are.
VALUES = {"INT": "N", "FLOAT": "X", "STR": "TEXT", "PATH": "FILE", "FILE": "FILE"}


class _ShortTypes:
    """Arguments and options, each with what its value is called."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "option" and param.metavar is None:
                param.metavar = "" if param.is_flag else _value(param, ctx)
        return params


class Group(_ShortTypes, TyperGroup):
    """Commands under one name."""


class Command(_ShortTypes, TyperCommand):
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


def _value(option: Any, ctx: Any) -> str:
    """What the value of an option is called."""
    # versions of typer differ in what shows the type
    show = getattr(option, "display_type_rich", None) or option.make_metavar
    shown = str(show(ctx=ctx))
    if "|" in shown:
        return shown
    kind = shown.strip("<>[]").removeprefix("list[").upper()
    return next((name for start, name in VALUES.items() if kind.startswith(start)), shown)
