"""Shared by the benchmarks: arguments, and the model with its cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyh2o import Llama
from pyh2o.models import find_model
from pyh2o.system.threads import physical_cores


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark with this module docstring: a model and its cache."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--rows", type=int, default=1024, help="heavy, recent and retrieved rows")
    parser.add_argument("--recent", type=int, default=None, help="recent rows; default: half")
    parser.add_argument(
        "--recall", type=int, default=None, help="retrieved rows; default: an eighth"
    )
    parser.add_argument("--threads", type=int, default=physical_cores())
    return parser


def settings_of(arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return arguments of `Llama`: a cache of `n` rows for the trained context."""
    half = arguments.rows - arguments.rows // 2
    recent = half if arguments.recent is None else arguments.recent
    return {
        "hh": arguments.rows - recent,
        "recent": recent,
        "recall": arguments.recall,
        "n_threads": arguments.threads,
        "n_threads_batch": arguments.threads,
        "verbose": False,
        **more,
    }


def open_model(arguments: argparse.Namespace, **more: Any) -> Llama:
    """Open the model with the cache of the arguments."""
    return Llama(str(find_model(arguments.model)), **settings_of(arguments, **more))
