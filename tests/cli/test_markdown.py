"""Markdown that is coloured while it streams: the same for all pieces, and never another text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.style import Style

from pyh2o.cli.chat.markdown import (
    BOLD,
    CODE,
    HEADING,
    ITALIC,
    MARK,
    PLAIN,
    QUOTE,
    MarkdownStyler,
    answer_writer,
)
from pyh2o.cli.terminal import terminal

BOTH = BOLD + ITALIC


def styled(*pieces: str) -> list[tuple[str, Style]]:
    """Segments of one style each, of all that the pieces make."""
    styler = MarkdownStyler()
    segments = [segment for piece in pieces for segment in styler.feed(piece)] + styler.finish()
    joined: list[tuple[str, Style]] = []
    for text, style in segments:
        if joined and joined[-1][1] == style:
            text = joined.pop()[0] + text
        joined.append((text, style))
    return joined


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("plain text", [("plain text", PLAIN)]),
        ("a **b c** d", [("a ", PLAIN), ("**b c**", BOLD), (" d", PLAIN)]),
        ("***b*** d", [("***b***", BOTH), (" d", PLAIN)]),
        ("**a *b* c**", [("**a ", BOLD), ("*b*", BOTH), (" c**", BOLD)]),
        ("2 * 3 ** 4", [("2 * 3 ** 4", PLAIN)]),
        ("snake_case_name", [("snake_case_name", PLAIN)]),
        ("**open\nnext", [("**open", BOLD), ("\nnext", PLAIN)]),
        ("say `a*b*` now", [("say ", PLAIN), ("`a*b*`", CODE), (" now", PLAIN)]),
        ("``a`b`` c", [("``a`b``", CODE), (" c", PLAIN)]),
        ("`open\nnext", [("`open", CODE), ("\nnext", PLAIN)]),
        ("odd `", [("odd `", PLAIN)]),
        ("# A *b*\nc", [("# A ", HEADING), ("*b*", HEADING + ITALIC), ("\nc", PLAIN)]),
        ("#hashtag", [("#hashtag", PLAIN)]),
        ("####### x", [("####### x", PLAIN)]),
        ("- a\n* **b**", [("- ", MARK), ("a\n", PLAIN), ("* ", MARK), ("**b**", BOLD)]),
        ("  12. a", [("  12. ", MARK), ("a", PLAIN)]),
        ("12.5 a", [("12.5 a", PLAIN)]),
        ("> a `b`", [("> a ", QUOTE), ("`b`", CODE)]),
        ("---\nx", [("---\nx", PLAIN)]),
        (
            "a\n```python\n# b\n* c **d**\n```\n# e",
            [
                ("a\n", PLAIN), ("```python", CODE), ("\n", PLAIN), ("# b", CODE), ("\n", PLAIN),
                ("* c **d**", CODE), ("\n", PLAIN), ("```", CODE), ("\n", PLAIN), ("# e", HEADING),
            ],
        ),
        (
            "~~~\n```\n~~~~\nx",
            [("~~~", CODE), ("\n", PLAIN), ("```", CODE), ("\n", PLAIN), ("~~~~", CODE),
             ("\nx", PLAIN)],
        ),
        ("```\nnever closed", [("```", CODE), ("\n", PLAIN), ("never closed", CODE)]),
        ("", []),
    ],
)  # fmt: skip
def test_each_mark_has_its_style(text: str, segments: list[tuple[str, Style]]) -> None:
    assert styled(text) == segments
    assert styled(*text) == segments


def test_any_text_in_any_pieces(rng: np.random.Generator) -> None:
    """No character is lost or changed, and where the pieces end makes no difference."""
    parts = [*"*`# \n1.>aé\t", "**", "```", "~~~", "- ", "b c"]
    for _ in range(2000):
        text = "".join(rng.choice(parts, size=int(rng.integers(0, 40))))
        cuts = np.sort(rng.integers(0, len(text) + 1, size=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = styled(text)
        assert "".join(segment for segment, _ in whole) == text
        assert styled(*pieces) == whole, (text, pieces)


def test_text_is_shown_at_once() -> None:
    """All but marks that may still mean something else."""
    styler = MarkdownStyler()
    shown = [
        "".join(text for text, _ in styler.feed(piece)) for piece in ("Hel", "lo *", "*y", "*")
    ]
    assert shown == ["Hel", "lo ", "**y", ""]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes the pieces of an answer to a console, and gives what is written."""

    def show(*pieces: str, **console: Any) -> str:
        shown: list[str] = []
        monkeypatch.setattr(terminal, "stdout", Console(**console))
        monkeypatch.setattr(terminal.terminal, "write", shown.append)
        with answer_writer(markdown=True) as write:
            for piece in pieces:
                write(piece)
        return "".join(shown)

    return show


COLOURS = {"force_terminal": True, "color_system": "truecolor", "no_color": False}


def test_codes_for_the_terminal(show: Callable[..., str]) -> None:
    text = show("# Ti", "tle\n", "a\tb ", "**c**", "\n", **COLOURS)
    title = "\x1b[1;35m# Ti\x1b[0m\x1b[1;35mtle\x1b[0m\n"
    assert text == f"{title}a\tb \x1b[1m**c\x1b[0m\x1b[1m**\x1b[0m\n"
    # Text that is copied from the screen is what the model wrote.
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == "# Title\na\tb **c**\n"


def test_control_characters_do_not_reach_the_terminal(show: Callable[..., str]) -> None:
    assert show("a\x1b]0;title\x07b\x9b2J\rc\n", **COLOURS) == "a]0;titleb2Jc\n"


@pytest.mark.parametrize(
    "console", [{"force_terminal": False}, {"force_terminal": True, "no_color": True}]
)
def test_colours_can_be_off(show: Callable[..., str], console: dict[str, Any]) -> None:
    assert show("`a` b\n", **console) == "`a` b\n"
