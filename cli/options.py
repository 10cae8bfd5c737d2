"""Options shared by commands, as frozen dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pyh2o.cache.settings import MAX_RETRIEVED, ArchiveType, Attention, EvictionSettings, Prefill
from pyh2o.policies import POLICIES, Policy
from pyh2o.writing.sampling import LARGEST_SEED, Sampling

from .shell_completion import complete_model

MODEL = "Model"
CACHE = "KV cache"
SAMPLING = "Sampling"
RECORDS = (EvictionSettings, Sampling)
"""Records of the library whose fields are options too."""


class KVType(str, Enum):
    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


# Options of commands that show answers.
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        "-s",
        help="System prompt, which is never evicted.",
        show_default="that of the chat template",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", min=1, help="Maximum tokens of an answer.", show_default="the window"
    ),
]
ReasoningBudget = Annotated[
    int | None,
    typer.Option(
        "--reasoning-budget",
        min=-1,
        help="Maximum reasoning tokens of an answer; 0 turns reasoning off, -1 is no limit.",
        show_default="no limit",
    ),
]
NoThinking = Annotated[
    bool,
    typer.Option(
        "--no-thinking", help="Turn off thinking, if the chat template of the model supports it."
    ),
]

Mmproj = Annotated[
    Path | None,
    typer.Option(
        "--mmproj", help="GGUF file of the projector for pictures and sound.", rich_help_panel=MODEL
    ),
]


def parse_rows(text: str | float) -> float:
    """Return a fraction of the window (0.1, 1.0: a float) or a number of tokens (256: an int)."""
    if isinstance(text, (int, float)):
        return text  # Typer parses defaults as well
    if text.strip() == "1":
        raise typer.BadParameter(
            "1 is ambiguous: write 1.0 for the whole window, or a count of 2 or more"
        )
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise typer.BadParameter(f"{text!r} is neither a fraction such as 0.1 nor a count such as 256")


def _option(panel: str, kind: Any, help_text: str, *names: str, **settings: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)]


_model = partial(_option, MODEL)
_cache = partial(_option, CACHE)
_sampling = partial(_option, SAMPLING)
_ROWS: dict[str, Any] = {"parser": parse_rows, "metavar": "ROWS"}

# Options by the names of the record fields that they set. The defaults are those of the records.
EVICTION_OPTIONS: dict[str, Any] = {
    "hh": _cache(
        float, "Heavy hitters to keep: a fraction of the window (0.1) or a count (256).", **_ROWS
    ),
    "recent": _cache(
        float, "Newest tokens to keep: a fraction of the window (0.1) or a count (256).", **_ROWS
    ),
    "pinned": _cache(int, "Number of first tokens that are never evicted.", min=0),
    "slack": _cache(
        int | None,
        "Cells beyond the budget that fill up between two compactions; 1 is the algorithm of the "
        "paper.",
        min=1,
        show_default="at least 64, up to a whole block of cells",
    ),
    "policy": _cache(
        str,
        f"Policy that scores rows: {', '.join(POLICIES)}, or FILE.py:CLASS; with parameters as in "
        "snap:queries=32,pool=5.",
    ),
    "attention": _cache(
        Attention,
        "Kernel for attention; avx512bf16 reads long prompts faster if the processor has it, and "
        "rounds to bf16.",
    ),
    "prefill": _cache(
        Prefill,
        "Read a text that is longer than the cache in chunks (stream), or in full in a temporarily "
        "larger cache (exact).",
    ),
    "prefill_mib": _cache(
        int | None, "Maximum MiB of an exact prefill.", min=1, show_default="no limit"
    ),
    "recall": _cache(
        float | None,
        "Rows of --hh and --recent that each token retrieves from the archive of evicted rows: a "
        "fraction of the window (0.05) or a count (128); 0 turns the archive off.",
        show_default=f"an eighth of both, at most {MAX_RETRIEVED}",
        **_ROWS,
    ),
    "recall_type": _cache(
        ArchiveType, "Type of the rows in the archive; f16 if q8_0 does not fit the head size."
    ),
    "recall_mib": _cache(
        int | None,
        "Maximum MiB of the archive, beyond which the oldest rows are removed.",
        min=1,
        show_default="a quarter of the free memory, shared by all texts",
    ),
    "keep_reasoning": _cache(bool, "Keep the reasoning of finished answers in the cache."),
}
SAMPLING_OPTIONS: dict[str, Any] = {
    "temperature": _sampling(
        float, "Temperature; 0 always selects the likeliest token.", "--temp", min=0.0
    ),
    "top_k": _sampling(int, "Sample from the K likeliest tokens; 0 is off.", min=0),
    "top_p": _sampling(
        float,
        "Sample from the likeliest tokens that reach this total probability; 1 is off.",
        min=0.0,
        max=1.0,
    ),
    "min_p": _sampling(
        float,
        "Exclude tokens below this share of the likeliest token's probability; 0 is off.",
        min=0.0,
        max=1.0,
    ),
    "typical_p": _sampling(
        float,
        "Locally typical sampling: total probability of the tokens closest to the expected "
        "surprise; 1 is off.",
        min=0.0,
        max=1.0,
    ),
    "repeat_penalty": _sampling(
        float, "Penalty for the last 64 tokens, against loops; 1 is off.", min=0.01
    ),
    "dry_multiplier": _sampling(
        float, "Penalty for tokens that extend a repetition (DRY), such as 0.8; 0 is off.", min=0
    ),
    "dry_base": _sampling(float, "Growth factor of the DRY penalty per repeated token.", min=1),
    "dry_allowed_length": _sampling(int, "Longest repetition without DRY penalty.", min=0),
    "dry_penalty_last_n": _sampling(
        int, "Number of tokens to search for repetitions; -1 is the window.", min=-1
    ),
    "dry_sequence_breakers": _sampling(
        list[str],
        "Text that ends a repetition, instead of the default ones; may be given several times; '' "
        "for none.",
        "--dry-sequence-breaker",
        show_default="a new line, a colon, a quotation mark, an asterisk",
    ),
    "xtc_probability": _sampling(
        float,
        "Probability of excluding all likely tokens except the least likely one (XTC); 0 is off.",
        min=0.0,
        max=1.0,
    ),
    "xtc_threshold": _sampling(
        float, "Minimum probability of tokens that XTC treats as likely.", min=0.0, max=1.0
    ),
    "seed": _sampling(
        int,
        "Random seed; the same seed gives the same text, -1 chooses a random one.",
        default_factory=lambda: -1,
        min=-1,
        max=LARGEST_SEED + 1,
        show_default="a new one each run",
    ),
}
MODEL_OPTIONS: dict[str, Any] = {
    "model": _model(
        Path | None,
        "GGUF file of the model, or a name from `pyh2o models list` or its first letters.",
        "--model",
        "-m",
        envvar="PYH2O_MODEL",
        autocompletion=complete_model,
        show_default="the demo model, see `pyh2o models`",
    ),
    "ctx": _model(int, "Window in tokens; 0 is the trained context of the model.", min=0),
    "gpu_layers": _model(
        int | None,
        "Number of layers on GPUs, or with --rpc on servers; -1 is all.",
        min=-1,
        envvar="PYH2O_GPU_LAYERS",
        show_default="as many as fit on discrete GPUs; all with --rpc",
    ),
    "rpc": _model(
        list[str] | None,
        "Servers for layers on other machines (`pyh2o rpc-server`); may be given several times.",
        metavar="HOST:PORT,...",
    ),
    "threads": _model(
        int | None,
        "CPU threads.",
        min=1,
        envvar="PYH2O_THREADS",
        show_default="one per physical core",
    ),
    "threads_batch": _model(
        int | None,
        "CPU threads for reading prompts.",
        min=1,
        envvar="PYH2O_THREADS_BATCH",
        show_default="--threads",
    ),
    "verbose": _model(bool, "Show the log of llama.cpp.", "--verbose"),
    "no_evict": _cache(bool, "Keep the full cache.", "--no-evict"),
    "kv_type": _cache(KVType, "Type of the cached K and V rows."),
}
OPTIONS = {**MODEL_OPTIONS, **EVICTION_OPTIONS, **SAMPLING_OPTIONS}


@dataclass(frozen=True)
class ModelOptions:
    model: Path | None = None
    mmproj: Path | None = None  # an option of some commands only
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
    sampling: Sampling = field(default=Sampling())


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options` of a command by an option for each field of that record.

    Typer reads the options of a command from its signature, so the fields are inserted there.
    Fields of nested library records are inserted too. The defaults are those of the parameter's
    default, if it has one. If a command has a parameter with the name of a field, there is no
    option for the field, which keeps its default.
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
    """Yield the fields of a record that are options as parameters for Typer."""
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
    """Return the record with the given values for its fields and those of nested records."""
    values = {
        name: _filled(value, given) if isinstance(value, RECORDS) else given.get(name, value)
        for name, value in vars(record).items()
    }
    return replace(record, **values)
