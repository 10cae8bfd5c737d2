"""Shared by the tests of conversations."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_chat_format import (
    ChatFormatterResponse,
    Jinja2ChatFormatter,
    chat_formatter_to_chat_completion_handler,
)

from pyh2o import Conversation, Llama
from pyh2o.core import text as texts
from pyh2o.core.parameters import KV_TYPES
from tiny_chat import CHATML

# The random model's answers are random too, and would not end without a limit.
SHORT = 9
EVICTING = {"n_ctx": 400, "hh": 60, "recent": 60, "slack": 40}
# Unrounded rows, because they are compared.
EXACT = {"type_k": KV_TYPES["f32"], "type_v": KV_TYPES["f32"], "flash_attn": False}
ROOMY = {"n_ctx": 2000, "hh": 1000, "recent": 1000, **EXACT}
FULL = {"n_ctx": 2048, "evict": False, **EXACT}
SYSTEM = "Speak like a pirate."


def is_end(llm: Llama, token: int) -> bool:
    return texts.text_of(llm).model.is_end(token)


def said(answer: Generator[str]) -> str:
    return "".join(answer)


def without_kv(file: Path) -> Path:
    """Delete the KV cache of a session file, whose text is then read again."""
    file.with_name(f"{file.name}.kv").unlink(missing_ok=True)
    return file


def text_of(conversation: Conversation) -> list[int]:
    return list(conversation._text.tokens)


def n_evaluated(conversation: Conversation) -> int:
    """Return how many tokens its model has evaluated."""
    return conversation.llm.model.batcher.counts.tokens


def in_cache(llm: Llama | texts.Text) -> list[int]:
    tokens: list[int] = texts.text_of(llm).tokens.tolist()
    return tokens


def next_logits(llm: Llama | texts.Text) -> npt.NDArray[np.single]:
    """Return logits after the newest token, which must have been evaluated last."""
    return texts.text_of(llm).logits[-1].copy()


def check_positions(conversation: Conversation, *, opening: bool = True) -> None:
    """Check that turns are adjacent, from the opening to the end of the text.

    The text may have another `opening` if the template changes it with later turns.
    """
    if not conversation.turns:
        return
    text, tokens = text_of(conversation), conversation._template.opening
    place = conversation.turns[0].start
    if opening:
        assert text[:place] == tokens[:place]
        # A first message can share a token with the opening's end.
        assert len(tokens) - 1 <= place <= len(tokens)
    for turn in conversation.turns:
        assert turn.start == place
        assert turn.start < turn.answer_start < turn.end
        place = turn.end
    assert place == len(text)


def stopping_at(*stops: str) -> Any:
    """Return a chat format like ChatML with these stop strings."""
    formatter = Jinja2ChatFormatter(CHATML, eos_token="", bos_token="<s>")

    def with_stops(**request: Any) -> ChatFormatterResponse:
        return replace(formatter(**request), stop=list(stops))

    return chat_formatter_to_chat_completion_handler(with_stops)


@dataclass
class Trap:
    """Makes the nth of several calls raise, before or after it runs."""

    countdown: int = -1
    error: type[BaseException] = KeyboardInterrupt
    after: bool = False
    passes: Callable[..., bool] = lambda *_: False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.passes(*args):
                return call(*args, **kwargs)
            self.countdown -= 1
            if self.countdown == 0 and not self.after:
                raise self.error
            result = call(*args, **kwargs)
            if self.countdown == 0:
                raise self.error
            return result

        return wrapped


def held_by_all(llm: Llama) -> set[int]:
    """Return positions that every layer and KV head keeps."""
    rows = [set(head) for layer in range(2) for head in llm.kv_rows(layer)[0].tolist()]
    return set.intersection(*rows)
