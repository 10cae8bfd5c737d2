"""Shared by the tests of completion: scripted models, and completions from an empty text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import pytest
from llama_cpp import LogitsProcessorList

from pyh2o import Llama
from pyh2o.writing.chat_prompt import prepare
from pyh2o.writing.request import Request
from tiny_tokens import BYTE_0, EOS

TRAINED_CONTEXT = 512
WINDOW = 256
SMALL_WINDOW = 128
# With so small a model several threads only wait for each other.
QUIET: dict[str, Any] = {"verbose": False, "n_threads": 1, "n_threads_batch": 1}


class Script:
    """A logits processor that makes the model generate these tokens and then end."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = iter([*tokens, EOS])

    def __call__(self, ids: Any, scores: Any) -> Any:
        scores[:] = -1e9
        scores[next(self.tokens, EOS)] = 0
        return scores


def says(*parts: str | int) -> dict[str, Any]:
    """Return arguments that make a tiny model generate this: a letter or a token for each token."""
    return {"logits_processor": LogitsProcessorList([Script(*script(*parts))]), "max_tokens": None}


def script(*parts: str | int) -> list[int]:
    """Return the tokens of letters or of their bytes."""
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else [BYTE_0 + byte for byte in part.encode()]
    return tokens


def complete(model: llama_cpp.Llama, given: str | Sequence[int], /, **arguments: Any) -> Any:
    """Complete from an empty text, so that earlier tests have no effect."""
    model.reset()
    return model.create_completion(given, **arguments)


def text_of(result: Any) -> str:
    text: str = result["choices"][0]["text"]
    return text


def streamed(model: llama_cpp.Llama, given: str | Sequence[int], /, **arguments: Any) -> list[Any]:
    return list(complete(model, given, stream=True, **arguments))


def joined(chunks: list[Any]) -> str:
    return "".join(text_of(chunk) for chunk in chunks)


def fed_tokens(
    model: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch, given: Any, **arguments: Any
) -> list[int]:
    """Return the tokens of a prompt that the model reads."""
    if isinstance(model, Llama):
        return prepare(model.text.model, Request(prompt=given, **arguments)).tokens
    fed: list[int] = []

    def fake(tokens: Sequence[int], **_: Any) -> Iterator[int]:
        fed.extend(tokens)
        yield EOS

    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", fake)
        model.create_completion(given, **arguments)
    return fed
