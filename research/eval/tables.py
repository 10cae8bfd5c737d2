"""From records to tables of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

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


def table_of(
    title: str, records: Sequence[R], columns: Sequence[Column[R]] | None = None
) -> TextTable:
    """A table with a row for each record, in the columns of its fields if no others are given."""
    if columns is None:
        columns = columns_of(type(records[0]))
    return TextTable(
        title,
        tuple(heading for heading, _ in columns),
        tuple(tuple(text(one) for _, text in columns) for one in records),
    )


# -------------------------------------------------------------------------------------------------
# Columns of records
# -------------------------------------------------------------------------------------------------


def column(heading: str, form: str | Callable[[Any], str] = "") -> dict[str, Any]:
    """The metadata of a record's field that has a column in its table, in the order of the fields.

    Args:
        heading: of the column.
        form: of the value; "±" at its end adds the standard error in the field NAME_error; or what
            makes a text of the whole record. Nothing is shown where there is no value.
    """
    return {"heading": heading, "form": form}


def columns_of(record: type[R]) -> tuple[Column[R], ...]:
    """The columns of a record."""
    shown = [one for one in fields(record) if one.metadata]  # type: ignore[arg-type]
    return tuple((one.metadata["heading"], _text_of(one.name, **one.metadata)) for one in shown)


def _text_of(name: str, heading: str, form: str | Callable[[Any], str]) -> Callable[[Any], str]:
    if callable(form):
        return form
    if form.endswith("±"):
        sign = form.removesuffix("±")
        return lambda one: with_error(getattr(one, name), getattr(one, f"{name}_error"), sign)
    return lambda one: number(getattr(one, name), form)


def number(value: Any, form: str) -> str:
    """A number, or nothing where there is none."""
    return "" if value is None else f"{value:{form}}"


def with_error(value: float | None, error: float | None, sign: str) -> str:
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
