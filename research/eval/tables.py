"""Markdown tables of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# The heading of a column, and a record's text in it.
Column = tuple[str, Callable[[dict[str, Any]], str]]


@dataclass(frozen=True)
class TextTable:
    """A table.

    Attributes:
        title: above the table.
        headings: of the columns; the first one names the rows.
        rows: a text for each column.
        remarks: below the table.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return the table with its title and remarks."""
        rule = "|---|" + "---:|" * (len(self.headings) - 1)
        lines = [f"**{self.title}**", "", _line(self.headings), rule, *map(_line, self.rows)]
        for remark in self.remarks:
            lines += ["", remark]
        return "\n".join(lines) + "\n"


def table_of(title: str, records: Sequence[dict[str, Any]], columns: Sequence[Column]) -> TextTable:
    """Return a table with a row per record; columns that are empty in all rows are left out."""
    shown = [one for one in columns if any(map(one[1], records))]
    return TextTable(
        title,
        tuple(heading for heading, _ in shown),
        tuple(tuple(text(one) for _, text in shown) for one in records),
    )


def column(heading: str, name: str, form: str = "") -> Column:
    """Return a column of a value; "±" after its format adds the error in NAME_error.

    Missing values are empty.
    """

    def text(one: dict[str, Any]) -> str:
        value, error = one[name], one.get(f"{name}_error")
        if value is None:
            return ""
        shown = f"{value:{form.removesuffix('±')}}"
        return f"{shown} ± {error:.4f}" if form.endswith("±") and error is not None else shown

    return heading, text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
