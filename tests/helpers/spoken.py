"""Tiny models with the chat templates of real ones, which generate given answers."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from chat_templates import template
from pyh2o.writing.sampler import Sampler
from tiny_gguf import write_tiny_gguf

# Special tokens of the templates' marks; those of reasoning and calls also match in ordinary text.
CONTROL = ("<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")
SEEN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")


def write_speaker(path: Path, name: str, **sizes: Any) -> Path:
    """Write a model with the template of this name."""
    marks = dict.fromkeys(CONTROL, TokenType.CONTROL)
    marks |= dict.fromkeys(SEEN, TokenType.USER_DEFINED)
    given = {"seed": 5, "n_ctx_train": 4096, "bpe": True, **sizes}
    return write_tiny_gguf(path, chat_template=template(name), marks=marks, **given)


def let_say(monkeypatch: pytest.MonkeyPatch) -> deque[str]:
    """Set the next answers of models, as far as a grammar allows them; then they end."""
    answers: deque[str] = deque()
    make, sample = Sampler.__init__, Sampler.sample
    left: dict[int, deque[int]] = {}

    def begin(self: Any, model: Any, *args: Any, **given: Any) -> None:
        make(self, model, *args, **given)
        if answers:
            text = answers.popleft().encode()
            tokens = model.tokenize(text, add_bos=False, special=True)
            left[id(self)] = deque([*tokens, model.native.token_eos()])

    def say(self: Any, logits: Any, tokens: Any) -> int:
        if left.get(id(self)):
            logits = logits.copy() - 1e6
            logits[left[id(self)][0]] = 1e3
        token = sample(self, logits, tokens)
        if left.get(id(self)) and left[id(self)][0] == token:
            left[id(self)].popleft()
        return token

    monkeypatch.setattr(Sampler, "__init__", begin)
    monkeypatch.setattr(Sampler, "sample", say)
    return answers
