"""From records to tables of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")

# The heading of a column, and a record's text in it.
Column = tuple[str, Callable[[R], str]]


@dataclass(frozen=True)
class TextTable:
    """A table to be shown.

    Attributes:
        title: what it is about.
        headings: of the columns; the first one names the rows.
        rows: a text for each column.
        remarks: what has to be said below it.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table with its title and remarks."""
        rule = "|---|" + "---:|" * (len(self.headings) - 1)
        lines = [f"**{self.title}**", "", _line(self.headings), rule, *map(_line, self.rows)]
        for remark in self.remarks:
            lines += ["", remark]
        return "\n".join(lines) + "\n"


def table_of(title: str, columns: Sequence[Column[R]], records: Iterable[R]) -> TextTable:
    """A table with a row for each record."""
    return TextTable(
        title,
        tuple(heading for heading, _ in columns),
        tuple(tuple(text(one) for _, text in columns) for one in records),
    )


# -------------------------------------------------------------------------------------------------
# Texts of cells
# -------------------------------------------------------------------------------------------------


def number(value: float | None, form: str) -> str:
    """A number, or nothing where there is none."""
    return "" if value is None else f"{value:{form}}"


def with_error(value: float | None, error: float | None, sign: str = "+") -> str:
    """A number and its standard error, as far as there are any."""
    if value is None:
        return ""
    shown = f"{value:{sign}.4f}"
    return shown if error is None else f"{shown} ± {error:.4f}"


def samples(count: int, one: str, many: str) -> str:
    """So many of them, in words."""
    return f"{count} {one if count == 1 else many}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
