"""Conversations with an archive, and what distinguishes two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conversations import EVICTING, in_cache, next_logits, said
from pyh2o import Conversation, Llama
from tiny_llama import tiny_llama

RECALLING = {**EVICTING, "hh": EVICTING["hh"] + 40, "recall": 40, "recall_type": "f16"}


def opened(path: Path, **settings: Any) -> Llama:
    return tiny_llama(path, **{**RECALLING, **settings})


def go_on(conversation: Conversation, word: str = "why", *, again: bool = False) -> list[Any]:
    """Return the text and the state of its continuation; `again` reads all of it again."""
    llm = conversation.llm
    text = said(conversation.say(f"{word} " * 40, max_tokens=150))
    kv = llm.kv
    spans = [(span.start, span.end, span.weight) for span in llm.recalled()]
    rows = [array for layer in range(2) for array in llm.kv_rows(layer)]
    seen = [text, next_logits(llm), spans, kv.archived, in_cache(llm), *rows]
    if again:
        seen += [said(conversation.regenerate(max_tokens=150)), next_logits(llm)]
    return seen


def assert_equal(mine: list[Any], other: list[Any]) -> None:
    for a, b in zip(mine, other, strict=True):
        np.testing.assert_equal(b, a)


def talk(path: Path, n_turns: int = 3) -> Conversation:
    """Return a conversation that has archived rows."""
    conversation = Conversation(opened(path))
    for i in range(n_turns):
        go_on(conversation, f"turn {i}")
    assert conversation.llm.kv.archived > 128  # at least a whole page, which is written to a file
    return conversation


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".gguf"}
