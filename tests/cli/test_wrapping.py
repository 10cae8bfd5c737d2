"""What a model says is broken between words at the edge of the terminal, while it comes."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from pyh2o.cli.terminal.wrapping import Wrapping
from random_cases import Cases

WIDTH = 20


def screen(written: str, width: int = WIDTH) -> list[str]:
    """The lines that a terminal shows."""
    lines, column = [""], 0
    for sign in re.findall(r"\x1b\[\d*[DK]|.|\n", written):
        if sign == "\n":
            lines.append("")
            column = 0
        elif sign.endswith("D") and len(sign) > 1:
            column -= int(sign[2:-1])
            assert column >= 0
        elif sign == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            if column == width:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column] + sign
            column += 1
    return lines


def shown(text: str, rng: np.random.Generator | None = None) -> list[str]:
    """A text that comes in pieces, of one sign each or at random."""
    wrapping, written = Wrapping(), ""
    while text:
        n = 1 if rng is None else int(rng.integers(1, 9))
        written += wrapping.feed(text[:n], WIDTH)
        text = text[n:]
    return screen(written)


def test_words_stay_whole(cases: Cases) -> None:
    for _, rng in cases(range(50)):
        sizes = rng.integers(1, WIDTH, 60)
        words = ["abcdefghijklmnopqrstuvwxyz"[:size] for size in sizes]
        lines = shown(" ".join(words), rng)
        assert [word for line in lines for word in line.split(" ") if word] == words
        assert max(map(len, lines)) <= WIDTH
        # no line ends too early
        for line, after in pairwise(lines):
            assert len(line.rstrip()) + 1 + len(after.split(" ")[0]) >= WIDTH


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("some traditions stay", ["some traditions ", "stay"]),
        ("one\ntwo", ["one", "two"]),
        ("a " + "b" * 30 + " c", ["a ", "b" * 20, "b" * 10 + " c"]),
        ("```\n" + "x = 1 " * 5 + "\n```\n" + "word " * 4, [
            "```", "x = 1 x = 1 x = 1 x ", "= 1 x = 1 ", "```", "word word word word", ""
        ]),
    ],
)  # fmt: skip
def test_lines(text: str, lines: list[str]) -> None:
    assert shown(text) == lines


def test_wide_signs_are_words() -> None:
    written = "".join(Wrapping().feed("語" * 15, WIDTH))
    assert written == "語" * 9 + "\n" + "語" * 6
