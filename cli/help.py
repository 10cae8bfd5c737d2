"""The help of a command as people read it: short types, and what is used most comes first."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from .options import CACHE, MODEL, SAMPLING

# Behind the panels of the command itself.
LAST_PANELS = [MODEL, SAMPLING, CACHE]
# How the values of options are called; others, such as choices, stay as they are.
VALUES = {"INT": "N", "FLOAT": "X", "STR": "TEXT", "PATH": "FILE", "FILE": "FILE"}


class Command(TyperCommand):
    """A command of the program."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.help = _paragraphs(self.help)
        self.params.sort(key=_place)

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options, each with what its value is called."""
        return _with_values(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """Commands under one name."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the group itself, each with what its value is called."""
        return _with_values(super().get_params(ctx), ctx)


def _paragraphs(text: str | None) -> str | None:
    """A docstring without the ends of its lines, which are not those of the terminal."""
    if text is None:
        return None
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _with_values(params: list[Any], ctx: Any) -> list[Any]:
    for param in params:
        if param.param_type_name == "option" and param.metavar is None:
            param.metavar = _value(param, ctx)
    return params


def _place(param: Any) -> int:
    panel = getattr(param, "rich_help_panel", None)
    return LAST_PANELS.index(panel) + 1 if panel in LAST_PANELS else 0


def _value(option: Any, ctx: Any) -> str:
    """What the value of an option is called; nothing for one that has none."""
    if option.is_flag:
        return ""
    # versions of typer differ in what shows the type
    show = getattr(option, "display_type_rich", None) or option.make_metavar
    shown = str(show(ctx=ctx))
    kind = shown.strip("<>[]").removeprefix("list[").upper()
    return next((name for start, name in VALUES.items() if kind.startswith(start)), shown)
