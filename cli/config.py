"""`pyh2o config`: the file with the user's defaults."""

from __future__ import annotations

import typer

from .defaults import VARIABLE, config_path, read_sections, variables_set
from .help import Group
from .terminal.terminal import terminal

app = typer.Typer(cls=Group, help="The file with defaults of your own.", no_args_is_help=True)


@app.command("path")
def path() -> None:
    """Print where the configuration file is, or would be (PYH2O_CONFIG changes it)."""
    terminal.write(f"{config_path()}\n")


@app.command("show")
def show() -> None:
    """Print what the configuration file sets, and which variables of the environment are set.

    Options on the command line come before variables, those before the file, and that before what
    is built in.
    """
    file = config_path()
    sections = read_sections(file)
    terminal.write(f"{file}{'' if sections else '  sets nothing'}\n")
    for section, values in sections.items():
        for key, value in values.items():
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            terminal.write(f"  [{section}] {key} = {shown}\n")
    variables = variables_set()
    variables.pop(VARIABLE, None)
    if variables:
        terminal.write("environment\n")
    for name, value in variables.items():
        terminal.write(f"  {name} = {value}\n")
