"""Renders the messages of a chat by a chat format or handler of llama_cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import llama_cpp

from ..core.chat_formats import ChatFormats
from ..errors import UnsupportedModelError


def format_messages(formats: ChatFormats, messages: list[dict[str, Any]]) -> Rendered:
    """Return the prompt of `llama_cpp.Llama.create_chat_completion` for these messages.

    Raises:
        UnsupportedModelError: the format raised an error, or does more than write a prompt.
    """
    prompt = Rendered(formats.name, formats.handler, formats.handlers)
    try:
        hidden: Any = formats.inert.hide_messages(messages)
        llama_cpp.Llama.create_chat_completion(prompt, messages=hidden, stream=True)
    except Exception as error:
        # Formats are programs, which can fail in any way.
        raise refused(error) from error
    return prompt


@dataclass
class Rendered:
    """Takes the place of the model in llama_cpp's chat completion, and records its prompt.

    Attributes:
        text: text of the prompt.
        add_bos: whether the tokenizer adds BOS to it.
        stops: strings that end an answer.
        stopping_criteria: llama_cpp's criteria, which end it too.
    """

    chat_format: str | None = None
    chat_handler: Any = None
    _chat_handlers: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False
    text: str = ""
    add_bos: bool = True
    stops: list[str] = field(default_factory=list)
    stopping_criteria: Any = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its handler does more than write a prompt, it uses {name}")

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        self.text, self.add_bos = text.decode(), add_bos
        return []

    def create_completion(self, prompt: str | list[int], **settings: Any) -> Iterator[Any]:
        if isinstance(prompt, str):
            self.text = prompt
        stop = settings.get("stop") or []
        self.stops = [stop] if isinstance(stop, str) else list(stop)
        self.stopping_criteria = settings.get("stopping_criteria")
        return iter(())


def refused(error: Exception) -> UnsupportedModelError:
    """Return the error for messages that a template refuses."""
    why = " ".join(str(error).split()) or type(error).__name__
    return UnsupportedModelError(f"the model's chat template refuses the conversation: {why}")
