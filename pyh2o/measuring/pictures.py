"""What the commands that draw a picture share: its format, and the bytes of its file."""

from __future__ import annotations

import io
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import MissingPackageError, SettingsError

SUFFIXES = (".png", ".svg")


def check_plot(name: str) -> str:
    """The format that the suffix of a file name asks for, before anything is measured.

    Raises:
        SettingsError: another suffix.
        MissingPackageError: matplotlib is not installed.
    """
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), None)
    if suffix is None:
        raise SettingsError(f"--plot {name}: give a name that ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise MissingPackageError(
            "--plot needs the package matplotlib: pip install 'pyh2o-llm[plot]'"
        )
    return suffix[1:]


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib; sizes in inches."""
    # Not pyplot: it would look for a screen.
    figure = import_module("matplotlib.figure")
    return figure.Figure(figsize=(width, height), layout="constrained")


def figure_bytes(figure: Any, file_format: str) -> bytes:
    """The figure as the bytes of a file."""
    file = io.BytesIO()
    figure.savefig(file, format=file_format)
    return file.getvalue()
