"""Messages as the text of a prompt: by the model's own template, or by a format of llama_cpp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp

from ..core.model import Model
from ..core.native_chat import ChatPrompt
from ..errors import ChatError, UnsupportedModelError
from .thinking import Thinking, refuse_without_template
from .tools import Tool


class Renderer:
    """Renders the messages of a chat for a model that knows of these tools, and thinks so."""

    def __init__(self, model: Model, tools: Sequence[Tool], thinking: Thinking) -> None:
        """No template is asked yet.

        Raises:
            SettingsError: something is said of thoughts, and the model's file has no template.
        """
        self._formats, self._thinking = model.chat, thinking
        self._tools = [tool.for_template() for tool in tools]
        self._native = model.chat.template(has_tools=bool(tools))
        if self._native is None:
            refuse_without_template(
                enable_thinking=thinking.enabled, reasoning_budget=thinking.budget
            )

    def render(self, messages: list[dict[str, Any]]) -> Rendered:
        """What `create_chat_completion` would feed.

        Raises:
            UnsupportedModelError: the template raised an error.
            SettingsError: it does not turn thoughts off.
        """
        if self._native is not None:
            try:
                chat = self._thinking.prompt(self._native, messages, tools=self._tools or None)
            except ChatError as error:
                raise _refused(error) from error
            stops = [self._formats.eos, *chat.stops]
            return Rendered(text=chat.prompt, add_bos=False, stops=stops, parts=chat)
        prompt = Rendered(self._formats.name, self._formats.handler, self._formats.handlers)
        try:
            hidden: Any = self._formats.inert.hide_messages(messages)
            llama_cpp.Llama.create_chat_completion(prompt, messages=hidden, stream=True)
        except Exception as error:
            # Templates are programs: besides refusing they can fail in any way.
            raise _refused(error) from error
        return prompt


@dataclass
class Rendered:
    """Stands in for the model in llama_cpp's chat completion, and takes down what it is fed.

    Attributes:
        text: of the prompt.
        add_bos: whether the tokenizer adds BOS to it.
        stops: strings that end an answer.
        stopping_criteria: llama_cpp's, that end it, too.
        parts: how thoughts and calls are told apart in it; None where the model's file has no
            template.
    """

    chat_format: str | None = None
    chat_handler: Any = None
    _chat_handlers: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False
    text: str = ""
    add_bos: bool = True
    stops: list[str] = field(default_factory=list)
    stopping_criteria: Any = None
    parts: ChatPrompt | None = None

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
