"""Command classes with a short help, and errors reported as one line."""

from __future__ import annotations

import copy
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .errors import reported_errors
from .options import CACHE, MODEL, SAMPLING

# Panels after those of the command itself.
LAST_PANELS = [MODEL, SAMPLING, CACHE]

A_DOZEN = 12
# fmt: off
USED = {
    "--model", "--ctx", "--gpu-layers", "--temp", "--seed", "--max-tokens", "--system",
    "--continue", "--session", "--no-save", "--web",
    "--prompt", "--prompt-file", "--until", "--output", "--resume",
    "--file", "--force", "--chat", "--ray", "--texts", "--host", "--port", "--api-key",
    "--history", "--rounds", "--json",
}
# fmt: on
"""The options that `--help` shows if a command has more than a dozen."""


class _Flags:
    """Hides the metavar of flags in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Group(_Flags, TyperGroup):
    """A group of commands."""


class Command(_Flags, TyperCommand):
    """A command of the program. Its own options come first in the help.

    If it has many options, `--help` shows the common ones and `--help-all` all of them.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # paragraphs without the docstring's line breaks, for the width of the terminal
        parts = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(part.split()) for part in parts) or None
        self.params.sort(key=_place)
        options = [param for param in self.params if param.param_type_name == "option"]
        many = len(options) > A_DOZEN
        self.rare = [param for param in options if many and USED.isdisjoint(param.opts)]
        self._help_all: Any = None

    def invoke(self, ctx: Any) -> Any:
        with reported_errors():
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        if self.rare and self._help_all is None:
            option: Any = copy.copy(self.get_help_option(ctx))
            option.name, option.opts, option.callback = "help_all", ["--help-all"], self._show_all
            option.help = "Show all options and exit."
            self._help_all = option
        return [*params, self._help_all] if self.rare else params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        short = copy.copy(self)
        if self.rare:
            short.params = [param for param in self.params if param not in self.rare]
            short.rare = []
            short.epilog = (
                f"{len(self.rare)} more options: {ctx.command_path} --help-all. The configuration "
                "file can set all of them."
            )
        TyperCommand.format_help(short, ctx, formatter)

    def _show_all(self, ctx: Any, _param: Any, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            super().format_help(ctx, formatter)
            typer.echo(formatter.getvalue().rstrip("\n"), color=ctx.color)
            ctx.exit()


def _place(param: Any) -> int:
    panel = getattr(param, "rich_help_panel", None)
    return LAST_PANELS.index(panel) + 1 if panel in LAST_PANELS else 0
