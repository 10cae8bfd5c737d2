"""What the commands that measure show while they run, and what they leave behind."""

from __future__ import annotations

import os
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pyh2o.cli.errors import InputError
from pyh2o.cli.terminal.progress import Bars
from pyh2o.cli.terminal.terminal import stdout, terminal
from pyh2o.system.files import replacement
from pyh2o.system.home import expanded

from .pictures import check_plot
from .tables import TextTable


class MeasuringBars(Bars):
    """A bar over all that is to be done, and one for work in between."""

    def __init__(self) -> None:
        super().__init__()
        self._done = 0
        self._total = 0

    def plan(self, total: int) -> None:
        """So much will be done."""
        self._total = total

    def advance(self, label: str, amount: int) -> None:
        """So much more of it is done."""
        self._done += amount
        self._show("measuring", self._done, self._total, label)

    def extra(self, label: str, done: int, total: int) -> None:
        """Work outside the plan."""
        self._show("preparing", done, total, label)

    def note(self, text: str) -> None:
        """Say something now."""
        terminal.say(text)


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------


class Picture:
    """Where a picture is going to be, checked before hours of measuring."""

    def __init__(self, name: Path) -> None:
        """Check the name.

        Raises:
            InputError: it exists, or its folder cannot be written to.
            PyH2OError: the picture cannot be drawn.
        """
        self.path = new_file("--plot", name)
        self.format = check_plot(name.name)


def new_file(option: str, name: Path) -> Path:
    """Where a new file is going to be.

    Raises:
        InputError: it exists, or its folder cannot be written to.
    """
    if expanded(name).exists():
        raise InputError(f"{name} exists: give another {option}, or remove it")
    return writable(option, name)


def writable(option: str, name: Path) -> Path:
    """The whole path of a file, if its folder can be written to.

    Raises:
        InputError: it cannot.
    """
    path = expanded(name).absolute()
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}: create it, or give another {option}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent} is not writable: give {option} another folder")
    return path


def write_file(path: Path, data: bytes) -> None:
    """Write a file next to where it belongs, and rename it: a crash leaves no half of one."""
    with replacement(path, prefix=".pyh2o-measured-") as file:
        file.write(data)


# -------------------------------------------------------------------------------------------------
# Tables
# -------------------------------------------------------------------------------------------------

# Between two columns of a drawn table, and at its edges together.
GAP = 2
EDGES = 2


def show_table(table: TextTable) -> None:
    """Print a table: drawn on a terminal, as Markdown elsewhere."""
    if stdout.is_terminal:
        draw_table(table, stdout)
    else:
        terminal.write("\n" + table.markdown())


def draw_table(table: TextTable, console: Console) -> None:
    """Draw a table; columns that do not fit beside the others follow below them.

    Headings are broken between words, cells never.
    """
    for number, columns in enumerate(parts(table, console.width)):
        drawn = Table(
            title=None if number else table.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for column in columns:
            drawn.add_column(
                table.headings[column],
                justify="right" if column else "left",
                vertical="bottom",
                width=cell_width(table, column),
            )
        for row in table.rows:
            drawn.add_row(*(row[column] for column in columns))
        console.print(drawn)
    for remark in table.remarks:
        console.print(remark, style="dim")


def parts(table: TextTable, width: int) -> list[list[int]]:
    """Numbers of the columns that are drawn beside each other, each time with the first one."""
    first = EDGES + cell_width(table, 0)
    found: list[list[int]] = []
    left = 0
    for column in range(1, len(table.headings)):
        needed = GAP + cell_width(table, column)
        if not found or needed > left:
            found.append([0])
            left = width - first
        found[-1].append(column)
        left -= needed
    return found


def cell_width(table: TextTable, column: int) -> int:
    """Characters of the widest cell of a column, or of the longest word of its heading."""
    cells = [row[column] for row in table.rows]
    return max(map(len, [*cells, *table.headings[column].split()]))
