"""What the benchmarks share: their arguments, the model with its cache, and how times are told."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyh2o import Llama
from pyh2o.models import find_model
from pyh2o.system.threads import physical_cores


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Arguments of a benchmark whose file has this docstring: a model and its cache."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--rows", type=int, default=1024, help="heavy, recent and found ones")
    parser.add_argument("--recent", type=int, default=None, help="of these; default: half")
    parser.add_argument("--recall", type=int, default=None, help="those found; default: an eighth")
    parser.add_argument("--threads", type=int, default=physical_cores())
    return parser


def open_model(arguments: argparse.Namespace, **more: Any) -> Llama:
    """The model, with a cache of so many rows for the context that it was trained on."""
    half = arguments.rows - arguments.rows // 2
    recent = half if arguments.recent is None else arguments.recent
    return Llama(
        str(find_model(arguments.model)),
        hh=arguments.rows - recent,
        recent=recent,
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
        verbose=False,
        **{"recall": arguments.recall, **more},
    )


def median_and_range(values: Sequence[float], form: str, unit: str) -> str:
    """Such as "1.25 ms (1.20 to 1.31)"."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} {unit} ({low:{form}} to {high:{form}})"
