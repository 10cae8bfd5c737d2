"""The options that commands share, as frozen records that are carried down."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pyh2o.cache.settings import (
    ARCHIVE_MIB,
    ArchiveType,
    Attention,
    EvictionSettings,
    Positions,
    Prefill,
)
from pyh2o.generation.sampling import LARGEST_SEED, Sampling
from pyh2o.policies import POLICIES, Policy

from .errors import reported_errors
from .shell_completion import complete_model

MODEL = "Model"
CACHE = "KV cache"
SAMPLING = "Sampling"


class KVType(str, Enum):
    """Types of the rows of the KV cache, by their ggml names."""

    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


# Whether answers are shown as the model writes them.
Plain = Annotated[bool, typer.Option("--plain", help="Show Markdown as it is, without colours.")]


def parse_rows(text: str | float) -> float:
    """A fraction of the window (0.1, 1.0: a float) or a number of tokens (256: an int).

    Raises:
        typer.BadParameter: text that is no number, or 1, which may mean either.
    """
    if isinstance(text, (int, float)):
        return text  # Typer parses defaults as well
    if text.strip() == "1":
        raise typer.BadParameter("1 may mean one row or the whole window: write 1.0, or 2 or more")
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a fraction such as 0.1 nor a count such as 256"
        ) from None


# The options that make a record of the library, by the record's fields, whose defaults are theirs.
EVICTION_OPTIONS: dict[str, Any] = {
    "hh": Annotated[
        float,
        typer.Option(
            parser=parse_rows,
            metavar="ROWS",
            help="Heavy hitters to keep: a fraction of the window (0.1) or a count (256).",
            rich_help_panel=CACHE,
        ),
    ],
    "recent": Annotated[
        float,
        typer.Option(
            parser=parse_rows,
            metavar="ROWS",
            help="Newest tokens to keep: a fraction of the window (0.1) or a count (256).",
            rich_help_panel=CACHE,
        ),
    ],
    "pinned": Annotated[
        int,
        typer.Option(
            min=0,
            help="First tokens of the text that are never evicted.",
            rich_help_panel=CACHE,
        ),
    ],
    "slack": Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cells that fill up between two compactions; 1 is the algorithm of the paper.",
            show_default="up to the next whole block of cells",
            rich_help_panel=CACHE,
        ),
    ],
    "policy": Annotated[
        str,
        typer.Option(
            help=f"What makes a row worth keeping: {', '.join(POLICIES)}, or FILE.py:CLASS; with "
            "parameters as in snap:queries=32,pool=5.",
            rich_help_panel=CACHE,
        ),
    ],
    "positions": Annotated[
        Positions,
        typer.Option(
            help="Positions of the rows: the text's own until the trained context is used up, or "
            "dense ones at every compaction.",
            rich_help_panel=CACHE,
        ),
    ],
    "attention": Annotated[
        Attention,
        typer.Option(
            help="What computes attention; avx512bf16 reads long prompts faster on processors that "
            "have it, and rounds them.",
            rich_help_panel=CACHE,
        ),
    ],
    "prefill": Annotated[
        Prefill,
        typer.Option(
            help="Read a text that is longer than the cache in a stream, or exactly: in full, in a "
            "larger cache for the while.",
            rich_help_panel=CACHE,
        ),
    ],
    "prefill_mib": Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most MiB that an exact prefill may take.",
            show_default="what it needs",
            rich_help_panel=CACHE,
        ),
    ],
    "recall": Annotated[
        float | None,
        typer.Option(
            parser=parse_rows,
            metavar="ROWS",
            help="Rows of --hh and --recent that each token finds among the evicted ones: a "
            "fraction of the window (0.05) or a count (128); 0 keeps no archive of them.",
            show_default="an eighth of both",
            rich_help_panel=CACHE,
        ),
    ],
    "recall_type": Annotated[
        ArchiveType,
        typer.Option(
            help="Type of the rows in the archive; f16 where q8_0 does not fit the head size.",
            rich_help_panel=CACHE,
        ),
    ],
    "recall_mib": Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most MiB that the archive may take; the oldest rows go.",
            show_default=f"{ARCHIVE_MIB}; of a chat that is saved what it needs",
            rich_help_panel=CACHE,
        ),
    ],
}
SAMPLING_OPTIONS: dict[str, Any] = {
    "temperature": Annotated[
        float,
        typer.Option(
            "--temp",
            min=0.0,
            help="Temperature; 0 always takes the likeliest token.",
            rich_help_panel=SAMPLING,
        ),
    ],
    "top_k": Annotated[
        int,
        typer.Option(
            min=0,
            help="Draw from the K likeliest tokens; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ],
    "top_p": Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Draw from the likeliest tokens that make up this probability; 1 is off.",
            rich_help_panel=SAMPLING,
        ),
    ],
    "min_p": Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Drop tokens below this share of the likeliest token's probability; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ],
    "repeat_penalty": Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Weaken tokens among the last 64, against loops of small models; 1 is off.",
            rich_help_panel=SAMPLING,
        ),
    ],
    "seed": Annotated[
        int,
        typer.Option(
            default_factory=lambda: secrets.randbelow(LARGEST_SEED + 1),
            min=0,
            max=LARGEST_SEED,
            help="Start of the random draws; the same seed gives the same text.",
            show_default="a new one each run",
            rich_help_panel=SAMPLING,
        ),
    ],
}
RECORDS: dict[Any, dict[str, Any]] = {
    EvictionSettings: EVICTION_OPTIONS,
    Sampling: SAMPLING_OPTIONS,
}


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model and what its cache keeps."""

    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            envvar="PYH2O_MODEL",
            autocompletion=complete_model,
            help="GGUF file of the model, or a name from `pyh2o models list` or its beginning.",
            show_default="the demo model, see `pyh2o models`",
            rich_help_panel=MODEL,
        ),
    ] = None
    ctx: Annotated[
        int,
        typer.Option(
            min=0,
            help="Window in tokens; 0 is the context the model was trained on.",
            rich_help_panel=MODEL,
        ),
    ] = 0
    gpu_layers: Annotated[
        int | None,
        typer.Option(
            min=-1,
            envvar="PYH2O_GPU_LAYERS",
            help="Layers to run on the GPU, or with --rpc on servers; -1 is all of them.",
            show_default="as many as fit on GPUs with memory of their own; all with --rpc",
            rich_help_panel=MODEL,
        ),
    ] = None
    rpc: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Other machines that compute layers (`pyh2o rpc-server`); may be given again.",
            rich_help_panel=MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="PYH2O_THREADS",
            help="CPU threads.",
            show_default="one for each physical core",
            rich_help_panel=MODEL,
        ),
    ] = None
    threads_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="PYH2O_THREADS_BATCH",
            help="CPU threads for reading prompts.",
            show_default="as many as --threads",
            rich_help_panel=MODEL,
        ),
    ] = None
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show the log of llama.cpp.", rich_help_panel=MODEL),
    ] = False
    eviction: EvictionSettings = field(default=EvictionSettings())
    no_evict: Annotated[
        bool,
        typer.Option("--no-evict", help="Keep the full cache.", rich_help_panel=CACHE),
    ] = False
    kv_type: Annotated[
        KVType,
        typer.Option(help="Type of the cached K and V rows.", rich_help_panel=CACHE),
    ] = KVType.f16


@dataclass(frozen=True)
class RunOptions(ModelOptions):
    """How to load a model, what its cache keeps and how tokens are drawn."""

    sampling: Sampling = field(default=Sampling())


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of its `options`, a record of this module, as an option.

    Typer reads the options of a command from its signature, so the fields are spliced in there, and
    in the place of a record of the library the options that make it. Where the command's `options`
    have a default, theirs are the defaults of the options. A parameter of the command that is
    called like a field takes its place, and leaves the field its default.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    options = own.pop("options")
    record: type[ModelOptions] = options.annotation
    defaults = record() if options.default is options.empty else options.default
    shared = [each for each in _parameters(defaults) if each.name not in own]
    replaced = {name: getattr(defaults, name) for name in own if hasattr(defaults, name)}

    def with_options(**values: Any) -> None:
        given = replaced | {parameter.name: values.pop(parameter.name) for parameter in shared}
        with reported_errors():
            options = _made(record, given)
        command(options=options, **values)

    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*own.values(), *shared]
    )
    with_options.__name__ = command.__name__
    with_options.__doc__ = command.__doc__
    return with_options


def option_named(name: str) -> Any:
    """The option of a field of `RunOptions`, or of a record in it, for commands of their own."""
    return next(each.annotation for each in _parameters(RunOptions()) if each.name == name)


def _parameters(record: Any) -> list[inspect.Parameter]:
    """The fields of a record as parameters that Typer understands, with its values as defaults."""
    kind = type(record)
    hints = RECORDS.get(kind) or get_type_hints(kind, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for item in fields(record):
        hint: Any = hints.get(item.name)
        default: Any = getattr(record, item.name)
        if hint in RECORDS:
            parameters += _parameters(default)
        elif hint is not None:
            if hint.__metadata__[0].default_factory is not None:
                default = inspect.Parameter.empty
            elif isinstance(default, Policy):
                default = str(default)
            parameters.append(
                inspect.Parameter(
                    item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
                )
            )
    return parameters


def _made(record: type[Any], values: Mapping[str, Any]) -> Any:
    """A record of what was given for its fields and for those of the records in it."""
    if record in RECORDS:
        return record(**{name: values[name] for name in RECORDS[record]})
    hints = get_type_hints(record)
    return record(
        **{
            item.name: _made(hints[item.name], values)
            if hints[item.name] in RECORDS
            else values[item.name]
            for item in fields(record)
        }
    )
