"""Arguments of measuring programs: shared options, lists, texts and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pyh2o.errors import PyH2OError, SettingsError
from pyh2o.models import find_model
from pyh2o.system.threads import physical_cores

from .caches import Compute, Rows

T = TypeVar("T")


def add_compute(parser: argparse.ArgumentParser) -> None:
    """Add options for the model and the devices."""
    parser.add_argument("--model", "-m", type=Path, help="GGUF file or name; default: demo model")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--gpu-layers", type=int, help="default: none; all with --rpc")
    parser.add_argument("--rpc", metavar="HOST:PORT,...", help="servers that compute layers")


def model_of(given: argparse.Namespace) -> Path:
    """Return the model's file."""
    return find_model(given.model)


def compute_of(given: argparse.Namespace) -> Compute:
    """Return the devices.

    Raises:
        SettingsError: a server's address is invalid.
    """
    from pyh2o.library import rpc

    servers = rpc.parse_servers([given.rpc]) if given.rpc else ()
    layers = given.gpu_layers
    if layers is None:
        layers = rpc.ALL_LAYERS if servers else 0
    return Compute(given.threads, layers, servers)


def numbers(parse: Callable[[str], T], text: str) -> tuple[T, ...]:
    """Return the distinct items of a comma-separated list."""
    return tuple(dict.fromkeys(parse(item.strip()) for item in text.split(",")))


def parse_rows(text: str) -> Rows:
    """Parse a fraction of the tokens (0.1, 1.0) or a count of rows (256)."""
    rows: Rows = int(text) if text.isdecimal() else float(text)
    if rows < 0 or (isinstance(rows, float) and rows > 1):
        raise argparse.ArgumentTypeError(f"{text}: give a fraction up to 1.0 or a count")
    return rows


def policies_of(given: list[str]) -> list[str]:
    """Return the policies of comma-separated lists.

    Commas also separate the parameters of a policy, as in "snap:queries=64,pool=5,h2o": a parameter
    belongs to the policy before it.
    """
    policies: list[str] = []
    for item in ",".join(given).split(","):
        if policies and "=" in item and ":" not in item:
            policies[-1] += f",{item}"
        else:
            policies.append(item.strip())
    return policies


def read_text(file: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        SettingsError: it is empty, or not UTF-8.
    """
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise SettingsError(f"{file} is empty: give --text a file with text")
    return text


def new_file(path: Path | None) -> Path | None:
    """Return the path of a new file, checked before hours of measuring.

    Raises:
        SettingsError: it exists, or its folder does not.
    """
    if path is not None and (path.exists() or not path.absolute().parent.is_dir()):
        raise SettingsError(f"{path} exists, or its folder does not: give another --json")
    return path


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def reported_errors() -> Iterator[None]:
    """End the program with a line and exit code 1 after an expected error, and 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        say("stopped by Ctrl-C")
        sys.exit(130)
    except (PyH2OError, OSError) as error:
        say(f"error: {error}")
        sys.exit(1)
