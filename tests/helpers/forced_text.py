"""Conversations whose model generates given text, a token per byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from pyh2o.core.text import Text
from pyh2o.writing import answer as answer_module
from pyh2o.writing.sampling import Sampling
from tiny_tokens import BYTE_0

ADD_CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def add_call(a: int, b: int) -> str:
    """Return a call in the format of the template `TOOLS`."""
    return ADD_CALL.format(a=a, b=b)


def force(monkeypatch: pytest.MonkeyPatch) -> deque[str | list[int]]:
    """Set the next answers, as texts or tokens; each ends normally."""
    texts: deque[str | list[int]] = deque()

    class Forced:
        def __init__(self, llm: Text, _sampling: Sampling, **_more: Any) -> None:
            self._llm = llm

        def write(self, tokens: Sequence[int]) -> Generator[int]:
            self._llm.eval(tokens)
            answer = texts.popleft()
            if isinstance(answer, str):
                answer = [BYTE_0 + byte for byte in answer.encode()]
            for token in answer:
                yield token
                self._llm.eval([token])
            yield self._llm.model.native.token_eos()

    monkeypatch.setattr(answer_module, "Writer", Forced)
    return texts
