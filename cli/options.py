"""The options that commands share, as frozen records that are carried down."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pyh2o.cache.settings import (
    MAX_FOUND,
    ArchiveType,
    Attention,
    EvictionSettings,
    Prefill,
)
from pyh2o.policies import POLICIES, Policy
from pyh2o.writing.sampling import LARGEST_SEED, Sampling

from .shell_completion import complete_model

MODEL = "Model"
CACHE = "KV cache"
SAMPLING = "Sampling"
RECORDS = (EvictionSettings, Sampling)
"""Of the library, whose fields are options, too."""


class KVType(str, Enum):
    """Types of the rows of the KV cache, by their ggml names."""

    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


# Of commands that show answers.
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        "-s",
        help="System prompt: what the model is told first. It is never evicted.",
        show_default="the model's own",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        min=1,
        help="Most tokens of an answer, against models that never stop.",
        show_default="as many as the window has",
    ),
]
ReasoningBudget = Annotated[
    int | None,
    typer.Option(
        "--reasoning-budget",
        min=-1,
        help="Most tokens of a model's thoughts; 0 for none, -1 for any number.",
        show_default="any number",
    ),
]
NoThinking = Annotated[
    bool,
    typer.Option(
        "--no-thinking", help="Tell the model not to think, if its chat template has that."
    ),
]

Mmproj = Annotated[
    Path | None,
    typer.Option(
        "--mmproj",
        help="GGUF file of the model's projector, for pictures and sound.",
        rich_help_panel=MODEL,
    ),
]


def parse_rows(text: str | float) -> float:
    """A fraction of the window (0.1, 1.0: a float) or a number of tokens (256: an int).

    Raises:
        typer.BadParameter: text that is no number, or 1, which may mean either.
    """
    if isinstance(text, (int, float)):
        return text  # Typer parses defaults as well
    if text.strip() == "1":
        raise typer.BadParameter("1 may mean one row or the whole window: write 1.0, or 2 or more")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise typer.BadParameter(f"{text!r} is neither a fraction such as 0.1 nor a count such as 256")


def _option(panel: str, kind: Any, help_text: str, *names: str, **settings: Any) -> Any:
    """The annotation of a parameter that is an option."""
    return Annotated[kind, typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)]


_model = partial(_option, MODEL)
_cache = partial(_option, CACHE)
_sampling = partial(_option, SAMPLING)
_ROWS: dict[str, Any] = {"parser": parse_rows, "metavar": "ROWS"}

# The options by the fields of the records that they make, whose defaults are theirs.
EVICTION_OPTIONS: dict[str, Any] = {
    "hh": _cache(
        float, "Heavy hitters to keep: a fraction of the window (0.1) or a count (256).", **_ROWS
    ),
    "recent": _cache(
        float, "Newest tokens to keep: a fraction of the window (0.1) or a count (256).", **_ROWS
    ),
    "pinned": _cache(int, "First tokens of the text that are never evicted.", min=0),
    "slack": _cache(
        int | None,
        "Cells that fill up between two compactions; 1 is the algorithm of the paper.",
        min=1,
        show_default="up to the next whole block of cells",
    ),
    "policy": _cache(
        str,
        f"What makes a row worth keeping: {', '.join(POLICIES)}, or FILE.py:CLASS; with parameters "
        "as in snap:queries=32,pool=5.",
    ),
    "attention": _cache(
        Attention,
        "What computes attention; avx512bf16 reads long prompts faster on processors that have it, "
        "and rounds them.",
    ),
    "prefill": _cache(
        Prefill,
        "Read a text that is longer than the cache in a stream, or exactly: in full, in a larger "
        "cache for the while.",
    ),
    "prefill_mib": _cache(
        int | None, "Most MiB that an exact prefill may take.", min=1, show_default="what it needs"
    ),
    "recall": _cache(
        float | None,
        "Rows of --hh and --recent that each token finds among the evicted ones: a fraction of the "
        "window (0.05) or a count (128); 0 keeps no archive of them.",
        show_default=f"an eighth of both, at most {MAX_FOUND}",
        **_ROWS,
    ),
    "recall_type": _cache(
        ArchiveType, "Type of the rows in the archive; f16 where q8_0 does not fit the head size."
    ),
    "recall_mib": _cache(
        int | None,
        "Most MiB that the archive may take; the oldest rows go.",
        min=1,
        show_default="a quarter of the free memory, shared by all texts; no limit for a saved chat",
    ),
    "keep_thoughts": _cache(
        bool, "Leave the thoughts of answers in the cache when these have ended."
    ),
}
SAMPLING_OPTIONS: dict[str, Any] = {
    "temperature": _sampling(
        float, "Temperature; 0 always takes the likeliest token.", "--temp", min=0.0
    ),
    "top_k": _sampling(int, "Draw from the K likeliest tokens; 0 is off.", min=0),
    "top_p": _sampling(
        float,
        "Draw from the likeliest tokens that make up this probability; 1 is off.",
        min=0.0,
        max=1.0,
    ),
    "min_p": _sampling(
        float,
        "Drop tokens below this share of the likeliest token's probability; 0 is off.",
        min=0.0,
        max=1.0,
    ),
    "typical_p": _sampling(
        float,
        "Draw from the tokens closest to the expected surprise that make up this probability; 1 is "
        "off.",
        min=0.0,
        max=1.0,
    ),
    "repeat_penalty": _sampling(
        float, "Weaken tokens among the last 64, against loops of small models; 1 is off.", min=0.01
    ),
    "dry_multiplier": _sampling(
        float, "Weaken tokens that would prolong a repetition (DRY), such as 0.8; 0 is off.", min=0
    ),
    "dry_base": _sampling(
        float, "By so much more for each token that the repetition is longer.", min=1
    ),
    "dry_allowed_length": _sampling(int, "Repetitions of so many tokens are not weakened.", min=0),
    "dry_penalty_last_n": _sampling(
        int,
        "Tokens of the text to search for repetitions; -1 is as many as the window has.",
        min=-1,
    ),
    "dry_sequence_breakers": _sampling(
        list[str],
        "A text that repetitions end at, in the place of the usual ones; may be given again; an "
        "empty one is none.",
        "--dry-sequence-breaker",
        show_default="a new line, a colon, a quotation mark, an asterisk",
    ),
    "xtc_probability": _sampling(
        float,
        "How often all likely tokens but the least likely of them are dropped (XTC); 0 is off.",
        min=0.0,
        max=1.0,
    ),
    "xtc_threshold": _sampling(
        float, "The probability from which on XTC takes a token for likely.", min=0.0, max=1.0
    ),
    "seed": _sampling(
        int,
        "Start of the random draws; the same seed gives the same text, -1 chooses a new one.",
        default_factory=lambda: -1,
        min=-1,
        max=LARGEST_SEED + 1,
        show_default="a new one each run",
    ),
}
MODEL_OPTIONS: dict[str, Any] = {
    "model": _model(
        Path | None,
        "GGUF file of the model, or a name from `pyh2o models list` or its beginning.",
        "--model",
        "-m",
        envvar="PYH2O_MODEL",
        autocompletion=complete_model,
        show_default="the demo model, see `pyh2o models`",
    ),
    "ctx": _model(int, "Window in tokens; 0 is the context the model was trained on.", min=0),
    "gpu_layers": _model(
        int | None,
        "Layers to run on the GPU, or with --rpc on servers; -1 is all of them.",
        min=-1,
        envvar="PYH2O_GPU_LAYERS",
        show_default="as many as fit on GPUs with memory of their own; all with --rpc",
    ),
    "rpc": _model(
        list[str] | None,
        "Other machines that compute layers (`pyh2o rpc-server`); may be given again.",
        metavar="HOST:PORT,...",
    ),
    "threads": _model(
        int | None,
        "CPU threads.",
        min=1,
        envvar="PYH2O_THREADS",
        show_default="one for each physical core",
    ),
    "threads_batch": _model(
        int | None,
        "CPU threads for reading prompts.",
        min=1,
        envvar="PYH2O_THREADS_BATCH",
        show_default="as many as --threads",
    ),
    "verbose": _model(bool, "Show the log of llama.cpp.", "--verbose"),
    "no_evict": _cache(bool, "Keep the full cache.", "--no-evict"),
    "kv_type": _cache(KVType, "Type of the cached K and V rows."),
}
OPTIONS = {**MODEL_OPTIONS, **EVICTION_OPTIONS, **SAMPLING_OPTIONS}


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model and what its cache keeps."""

    model: Path | None = None
    mmproj: Path | None = None  # an option of commands that have a use for it
    ctx: int = 0
    gpu_layers: int | None = None
    rpc: list[str] | None = None
    threads: int | None = None
    threads_batch: int | None = None
    verbose: bool = False
    eviction: EvictionSettings = field(default=EvictionSettings())
    no_evict: bool = False
    kv_type: KVType = KVType.f16


@dataclass(frozen=True)
class RunOptions(ModelOptions):
    """How to load a model, what its cache keeps and how tokens are drawn."""

    sampling: Sampling = field(default=Sampling())


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of its `options`, a record such as those above, as an option.

    Typer reads the options of a command from its signature, so the fields are spliced in there, and
    in the place of a record of the library the options that make it. Where the command's `options`
    have a default, theirs are the defaults of the options. A parameter of the command that is
    called like a field takes its place, and leaves the field its default.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    options = own.pop("options")
    record = options.annotation() if options.default is options.empty else options.default
    shared = [each for each in _parameters(record) if each.name not in own]

    def with_options(**values: Any) -> None:
        given = {each.name: values.pop(each.name) for each in shared}
        command(options=_filled(record, given), **values)

    signature = inspect.Signature([*own.values(), *shared])
    with_options.__signature__ = signature  # type: ignore[attr-defined]
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    return with_options


def _parameters(record: Any) -> Iterator[inspect.Parameter]:
    """The fields of a record as parameters that Typer understands, with its values as defaults.

    A field that is no option, here or by its own annotation, is left at its default.
    """
    hints = get_type_hints(type(record), include_extras=True)
    for name, default in vars(record).items():
        hint = hints[name] if hasattr(hints[name], "__metadata__") else OPTIONS.get(name)
        if isinstance(default, RECORDS):
            yield from _parameters(default)
        elif hint is not None:
            if hint.__metadata__[0].default_factory is not None:
                default = inspect.Parameter.empty
            elif isinstance(default, Policy):
                default = str(default)
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
            )


def _filled(record: Any, given: Mapping[str, Any]) -> Any:
    """The record with what was given for its fields and for those of the records in it."""
    values = {
        name: _filled(value, given) if isinstance(value, RECORDS) else given.get(name, value)
        for name, value in vars(record).items()
    }
    return replace(record, **values)
