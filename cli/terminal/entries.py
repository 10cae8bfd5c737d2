"""A label and what is said of it, as lines that fit 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 79
LABEL = 14


def entry(label: str, sentences: Iterable[str]) -> list[str]:
    """Lines of a label and what is said of it; a word that is too long for one is not broken."""
    margin = " " * (2 + LABEL)
    lines = [
        line
        for sentence in sentences
        for line in textwrap.wrap(
            sentence,
            WIDTH - len(margin),
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
    return [
        f"  {label:{LABEL}}{line}\n" if number == 0 else f"{margin}{line}\n"
        for number, line in enumerate(lines)
    ]
