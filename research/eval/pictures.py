"""From records to pictures: the format, the lines and bars, and the bytes of the file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pyh2o.errors import MissingPackageError, SettingsError

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


def draw_lines(axis: Any, lines: Mapping[str, Sequence[tuple[int, float | None]]]) -> None:
    """A line for each label, through its points in the order of x; from 0 on."""
    for label, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axis.set_ylim(bottom=0)
    add_legend(axis)


def draw_bars(axis: Any, names: Sequence[str], values: Sequence[float], label: str) -> None:
    """A bar for each name, the first one on top."""
    axis.barh(names, values)
    axis.invert_yaxis()
    axis.set(xlabel=label)


def add_legend(axis: Any) -> None:
    """Name what is drawn, if anything is."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")


def figure_bytes(figure: Any, file_format: str) -> bytes:
    """The figure as the bytes of a file."""
    file = io.BytesIO()
    figure.savefig(file, format=file_format)
    return file.getvalue()
