"""Messages as the text of a prompt: by llama_cpp's handlers, or with tools by llama.cpp itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp

from ..core.model import Model
from ..core.native_chat import ChatPrompt
from ..errors import ChatError, UnsupportedModelError
from .tools import Tool


class Renderer:
    """Renders the messages of a chat for a model that knows of these tools."""

    def __init__(self, model: Model, tools: Sequence[Tool]) -> None:
        self._model = model
        self._tools = [tool.for_template() for tool in tools]
        self._native = model.chat.template(has_tools=bool(tools))

    def render(self, messages: list[dict[str, Any]]) -> Rendered:
        """What `create_chat_completion` would feed; of tools llama.cpp knows what templates want.

        Raises:
            UnsupportedModelError: the template raised an error.
        """
        if self._tools and self._native is not None:
            try:
                chat = self._native.apply(messages, tools=self._tools)
            except ChatError as error:
                raise _refused(error) from error
            stops = [self._model.chat.eos, *chat.stops]
            return Rendered(None, None, {}, text=chat.prompt, add_bos=False, stops=stops)
        formats = self._model.chat
        prompt = Rendered(formats.name, formats.handler, formats.handlers)
        try:
            llama_cpp.Llama.create_chat_completion(prompt, messages=messages, stream=True)
        except Exception as error:
            # Templates are programs: besides refusing they can fail in any way.
            raise _refused(error) from error
        return prompt

    def parts(self, messages: list[dict[str, Any]]) -> ChatPrompt | None:
        """How thoughts and calls are told apart in the answers; None if they have neither."""
        if self._native is None:
            return None
        try:
            prompt = self._native.apply(messages, tools=self._tools)
        except ChatError:  # of templates that only Jinja itself can read
            return None
        return prompt if self._tools or prompt.supports_thinking else None


@dataclass
class Rendered:
    """Stands in for the model in llama_cpp's chat completion, and takes down what it is fed.

    Attributes:
        text: of the prompt.
        add_bos: whether the tokenizer adds BOS to it.
        stops: strings that end an answer.
        stopping_criteria: llama_cpp's, that end it, too.
    """

    chat_format: str | None
    chat_handler: Any
    _chat_handlers: dict[str, Any]
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


def _refused(error: Exception) -> UnsupportedModelError:
    why = " ".join(str(error).split()) or type(error).__name__
    return UnsupportedModelError(f"the model's chat template refuses the conversation: {why}")
