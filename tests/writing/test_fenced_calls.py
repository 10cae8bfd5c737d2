"""Calls in blocks of code: taken out of what is said, however the text is cut into pieces."""

from __future__ import annotations

import pytest

from pyh2o.writing.fenced_calls import FencedCalls
from pyh2o.writing.tools import Call

FOUND = [Call("add", '{"a": 1, "b": "x"}')]
BLOCK = '```json\n{\n  "name": "add",\n  "arguments": {"a": 1, "b": "x"}\n}\n```'


def read(text: str, size: int) -> tuple[str, list[Call], list[str]]:
    """What is said, the calls, and the pieces as they came."""
    reader = FencedCalls({"add"})
    pieces = [reader.add(text[n : n + size]) for n in range(0, len(text), size)]
    pieces.append(reader.end())
    return "".join(pieces), reader.calls, pieces


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (BLOCK, "", FOUND),
        (f"Let me see.\n{BLOCK}\n", "Let me see.\n", FOUND),
        (f"{BLOCK}\n{BLOCK}", "", FOUND * 2),
        (BLOCK.replace("json", ""), "", FOUND),
        (BLOCK.replace("arguments", "parameters"), "", FOUND),
        (BLOCK.replace("add", "sub"), BLOCK.replace("add", "sub"), []),
        (BLOCK.replace("arguments", "values"), BLOCK.replace("arguments", "values"), []),
        (BLOCK.replace('"a": 1', '"a": '), BLOCK.replace('"a": 1', '"a": '), []),
        (BLOCK[:-3], BLOCK[:-3], []),
        (f"Code:\n```python\nx = {{}}\n```\n{BLOCK}", "Code:\n```python\nx = {}\n```\n", FOUND),
        (f"````\n{BLOCK}", f"````\n{BLOCK}", []),
        ("a `word` and ``two`` and ```", "a `word` and ``two`` and ```", []),
        ("```json\n[1]\n``` and ```x```", "```json\n[1]\n``` and ```x```", []),
    ],
)
def test_calls_are_taken_out(text: str, said: str, calls: list[Call], size: int) -> None:
    found_said, found_calls, _ = read(text, size)
    assert (found_said, found_calls) == (said, calls)


def test_other_code_is_passed_on_as_it_comes() -> None:
    text = "Look:\n```python\nprint(1)\n```\nDone."
    _, _, pieces = read(text, 1)
    end = text.index("print") + 5
    assert "".join(pieces[:end]) == text[:end]
