"""What the user gives to the commands that measure: shared options, lists and text files."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pyh2o.cli.errors import InputError
from pyh2o.cli.loading import usable_gpu_layers
from pyh2o.cli.options import option_named, parse_rows
from pyh2o.cli.text_files import decoded
from pyh2o.system.home import expanded
from pyh2o.system.threads import physical_cores

from .caches import Compute

T = TypeVar("T")

COMPARED = "What is compared"
RESULTS = "Results"

PLOT = typer.Option(help="New PNG or SVG file for a picture.", rich_help_panel=RESULTS)


def shared(name: str) -> Any:
    """An option that other commands have, too, with the same help."""
    return option_named(name).__metadata__[0]


# Caches of several sizes are compared: on the CPU, unless the user says otherwise.
GPU_LAYERS = copy(shared("gpu_layers"))
GPU_LAYERS.show_default = "none; all with --rpc"


def policy_option(default: str) -> Any:
    """The option for the policies that are compared."""
    return typer.Option(
        metavar="POLICY,...",
        help="What makes a row worth keeping, such as snap:queries=64; may be given again.",
        show_default=default,
        rich_help_panel=COMPARED,
    )


def budget_option(of: str) -> Any:
    """The option for the budgets that are compared.

    Args:
        of: what fractions are fractions of.
    """
    return typer.Option(
        metavar="ROWS,...",
        help=f"Rows that a token attends to, in the cache and found among the evicted ones: "
        f"fractions of {of} or counts.",
        rich_help_panel=COMPARED,
    )


def recall_option(of: str) -> Any:
    """The option for how many of them are found.

    Args:
        of: what fractions are fractions of.
    """
    return typer.Option(
        metavar="ROWS,...",
        help=f"How many rows of the budget are found among the evicted ones: fractions of {of} or "
        "counts; 0 is a cache without an archive. Sinks and a window alone never find any.",
        show_default="an eighth of the budget",
        rich_help_panel=COMPARED,
    )


@dataclass(frozen=True)
class MeasuringOptions:
    """What all commands that measure have."""

    model: Annotated[Path | None, shared("model")] = None
    gpu_layers: Annotated[int | None, GPU_LAYERS] = None
    threads: Annotated[int | None, shared("threads")] = None

    def compute(self) -> Compute:
        """What to compute with; says so if there is no GPU."""
        return Compute(self.threads or physical_cores(), usable_gpu_layers(self.gpu_layers))


def parse_list(option: str, text: str, parse: Callable[[str], T], example: str) -> tuple[T, ...]:
    """The items of a list with commas, each once.

    Raises:
        InputError: an item that is nothing of the kind.
    """
    try:
        return tuple(dict.fromkeys(parse(item.strip()) for item in text.split(",")))
    except InputError:
        raise
    except (ValueError, typer.BadParameter):
        raise InputError(f"{option} {text!r} is no list such as {example}") from None


def split_policies(given: list[str]) -> list[str]:
    """The policies of some lists with commas.

    Commas also stand between the parameters of a policy, as in "snap:queries=64,pool=5,h2o": what
    is a parameter belongs to the policy before it.

    Raises:
        InputError: a list without a policy.
    """
    policies: list[str] = []
    for text in given:
        found: list[str] = []
        for item in (part.strip() for part in text.split(",")):
            if found and "=" in item and ":" not in item:
                found[-1] += f",{item}"
            else:
                found.append(item)
        if not all(found):
            raise InputError(f"--policy {text!r} is no list such as h2o,streaming")
        policies += found
    return policies


def parse_budgets(text: str) -> tuple[float | int, ...]:
    """Fractions of the window and counts of rows, larger than 0.

    Raises:
        InputError: 0 or less, or no number.
    """

    def parse(item: str) -> float:
        budget = parse_rows(item)
        if not budget > 0:
            raise InputError(f"--budget {item}: give more than 0 rows")
        return budget

    return parse_list("--budget", text, parse, "0.2,512")


def parse_recalls(text: str | None) -> tuple[float | int | None, ...]:
    """As `parse_budgets`, and 0 for none; None, the default part, where nothing is given.

    Raises:
        InputError: less than 0, or no number.
    """
    if text is None:
        return (None,)

    def parse(item: str) -> float:
        recall = parse_rows(item)
        if recall < 0:
            raise InputError(f"--recall {item}: give 0 or more rows")
        return recall

    return parse_list("--recall", text, parse, "0,256")


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        InputError: there is none, or it is not UTF-8 or empty.
    """
    try:
        data = expanded(file).read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no text file {file}: check --text") from None
    except OSError as error:  # reading, unlike opening, does not say which file
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    text = decoded(data, str(file))
    if not text.strip():
        raise InputError(f"{file} is empty: give --text a file with text")
    return text
