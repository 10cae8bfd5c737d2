"""What the commands that measure share: their lists, text files, new files and tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich import box
from rich.table import Table

from pyh2o.measuring.tables import TextTable
from pyh2o.system.files import replacement

from ..errors import InputError
from ..options import option_named, parse_rows
from ..terminal.terminal import stdout, terminal

T = TypeVar("T")


def shared(name: str) -> Any:
    """An option that other commands have, too, with the same help."""
    return option_named(name).__metadata__[0]


# -------------------------------------------------------------------------------------------------
# What the user gives
# -------------------------------------------------------------------------------------------------


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


def parse_budget(text: str) -> float:
    """A fraction of the window or a count of rows, larger than 0.

    Raises:
        InputError: 0 or less.
        typer.BadParameter: no number.
    """
    budget = parse_rows(text)
    if not budget > 0:
        raise InputError(f"--budget {text}: give more than 0 rows")
    return budget


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        InputError: there is none, or it is not UTF-8 or empty.
    """
    try:
        text = file.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no text file {file}: check --text") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    if not text.strip():
        raise InputError(f"{file} is empty: give --text a file with text")
    return text


# -------------------------------------------------------------------------------------------------
# What the user gets
# -------------------------------------------------------------------------------------------------


def new_file(option: str, name: Path) -> Path:
    """Where a new file is going to be.

    Raises:
        InputError: it exists, or its folder cannot be written to.
    """
    path = name.expanduser().absolute()
    if path.exists():
        raise InputError(f"{name} exists: give another {option}, or remove it")
    return writable(option, path)


def writable(option: str, path: Path) -> Path:
    """The path itself, if files can be written to its folder.

    Raises:
        InputError: they cannot.
    """
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}: create it, or give another {option}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent} is not writable: give {option} another folder")
    return path


def write_file(path: Path, data: bytes) -> None:
    """Write a file next to where it belongs, and rename it: a crash leaves no half of one."""
    with replacement(path, prefix=".pyh2o-measured-") as file:
        file.write(data)


def show_table(table: TextTable) -> None:
    """Print a table: drawn on a terminal, as Markdown elsewhere."""
    if not stdout.is_terminal:
        terminal.write("\n" + table.markdown())
        return
    drawn = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*row)
    stdout.print(drawn)
    for remark in table.remarks:
        stdout.print(remark, style="dim")
