"""The options that commands share, as frozen records that are carried down."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pyh2o.cache.settings import DEFAULT_POLICY, Positions, Prefill
from pyh2o.generation.sampling import LARGEST_SEED
from pyh2o.policies import POLICIES

MODEL = "Model"
CACHE = "KV cache"
SAMPLING = "Sampling"


class KVType(str, Enum):
    """Types of the rows of the KV cache, by their ggml names."""

    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


def parse_rows(text: str | float) -> float:
    """A fraction of the window (0.1, 1.0: a float) or a number of tokens (256, 1: an int).

    Raises:
        typer.BadParameter: text that is no number.
    """
    if isinstance(text, float):
        return text  # Typer parses defaults as well
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


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model and what its cache keeps."""

    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            envvar="PYH2O_MODEL",
            help="GGUF file of the model.",
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
        int,
        typer.Option(
            min=-1,
            envvar="PYH2O_GPU_LAYERS",
            help="Layers to run on the GPU; -1 is all of them.",
            rich_help_panel=MODEL,
        ),
    ] = 0
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
    hh: Annotated[
        float,
        typer.Option(
            parser=parse_rows,
            metavar="ROWS",
            help="Heavy hitters to keep: a fraction of the window (0.1) or a count (256).",
            rich_help_panel=CACHE,
        ),
    ] = 0.1
    recent: Annotated[
        float,
        typer.Option(
            parser=parse_rows,
            metavar="ROWS",
            help="Newest tokens to keep: a fraction of the window (0.1) or a count (256).",
            rich_help_panel=CACHE,
        ),
    ] = 0.1
    pinned: Annotated[
        int,
        typer.Option(
            min=0,
            help="First tokens of the text that are never evicted.",
            rich_help_panel=CACHE,
        ),
    ] = 0
    slack: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cells that fill up between two compactions; 1 is the algorithm of the paper.",
            show_default="up to the next whole block of cells",
            rich_help_panel=CACHE,
        ),
    ] = None
    policy: Annotated[
        str,
        typer.Option(
            help=f"What makes a row worth keeping: {', '.join(POLICIES)}; with parameters as in "
            "snap:queries=32,pool=5.",
            rich_help_panel=CACHE,
        ),
    ] = DEFAULT_POLICY
    positions: Annotated[
        Positions,
        typer.Option(
            help="Positions of the rows: the text's own until the trained context is used up, or "
            "dense ones at every compaction.",
            rich_help_panel=CACHE,
        ),
    ] = "original"
    prefill: Annotated[
        Prefill,
        typer.Option(
            help="Read a text that is longer than the cache in a stream, or exactly: in full, in a "
            "larger cache for the while.",
            rich_help_panel=CACHE,
        ),
    ] = "stream"
    prefill_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most MiB that an exact prefill may take.",
            show_default="what it needs",
            rich_help_panel=CACHE,
        ),
    ] = None
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

    temp: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Temperature; 0 always takes the likeliest token.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.8
    top_k: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draw from the K likeliest tokens; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 40
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Draw from the likeliest tokens that make up this probability; 1 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Drop tokens below this share of the likeliest token's probability; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.05
    # Small models such as the demo model fall into loops in a long text; 1.1 over the last 64
    # tokens breaks most loops and hardly changes what a larger model writes.
    repeat_penalty: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Weaken tokens among the last 64, against loops of small models; 1 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.1
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=LARGEST_SEED,
            help="Start of the random draws; the same seed gives the same text.",
            show_default="a new one each run",
            rich_help_panel=SAMPLING,
        ),
    ] = None

    def sampling(self) -> dict[str, Any]:
        """The sampling keywords of `create_completion` and `create_chat_completion`."""
        return {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
        }

    def chosen_seed(self) -> int:
        """The user's seed, or a new one."""
        return secrets.randbelow(LARGEST_SEED + 1) if self.seed is None else self.seed


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of its `options`, a record of this module, as an option.

    Typer reads the options of a command from its signature, so the fields are spliced in there.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    record: type[ModelOptions] = own.pop("options").annotation
    names = [option.name for option in fields(record)]

    def with_options(**values: Any) -> None:
        command(options=record(**{name: values.pop(name) for name in names}), **values)

    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*own.values(), *_parameters(record)]
    )
    with_options.__name__ = command.__name__
    with_options.__doc__ = command.__doc__
    return with_options


def _parameters(record: type[ModelOptions]) -> list[inspect.Parameter]:
    """The fields of a record as parameters that Typer understands."""
    hints = get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=hints[option.name],
        )
        for option in fields(record)
    ]
