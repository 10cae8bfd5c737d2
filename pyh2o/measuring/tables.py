"""Tables of texts, and how they name a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def budget_name(budget: float | int) -> str:
    """A budget in words: "20 %" or "1638 rows"."""
    return f"{budget} rows" if isinstance(budget, int) else f"{budget * 100:g} %"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
