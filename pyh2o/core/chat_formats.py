"""How messages become a prompt: the templates in a model's file, or llama_cpp's chat formats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

from jinja2 import TemplateError
from llama_cpp import StoppingCriteriaList, llama_chat_format

from ..errors import ChatError, ModelError
from .inert import InertTexts
from .native_chat import NativeTemplate

# In a model's metadata: the one template, or the first part of the names of several.
_TEMPLATE = "tokenizer.chat_template"
_DEFAULT = "chat_template.default"
_TOOL_USE = "chat_template.tool_use"
# For models that say nothing, as in llama_cpp.
_FALLBACK = "llama-2"


class ChatFormats:
    """The chat format of a model, and the handlers of templates in its file.

    Attributes:
        name: of the format; a key of `handlers`, or one of llama_cpp's. None with a handler.
        handler: llama_cpp's, given by the user; it goes before `name`.
        handlers: of the templates in the file, by name.
        eos: the text of this token; "" if there is none.
        inert: hides the texts of special tokens in messages and tools.
    """

    def __init__(self, native: Any, metadata: Mapping[str, str]) -> None:
        """`native` is llama_cpp's internal model.

        Raises:
            ModelError: a template in the file is none.
        """
        self.handler: Any = None
        bos, self.eos = (
            native.token_get_text(token) if token != -1 else ""
            for token in (native.token_bos(), native.token_eos())
        )
        self._native: dict[str, NativeTemplate | None] = {}
        self.handlers: dict[str, Any] = {}
        sources = _templates(metadata)
        self.inert = InertTexts(native, list(sources.values()))
        for name, source in sources.items():
            self._native[name] = template = _native(source, bos, self.eos, self.inert)
            formatter = (
                _jinja(native, source, bos, self.eos)
                if template is None
                else partial(_formatted, template, self.eos, native.token_eos())
            )
            handler = llama_chat_format.chat_formatter_to_chat_completion_handler(formatter)
            self.handlers[name] = handler
        self.name: str | None = self._found(metadata)
        self._guessed = self.name

    def _found(self, metadata: Mapping[str, str]) -> str:
        if _DEFAULT not in self.handlers:
            return _FALLBACK
        known = llama_chat_format.guess_chat_format_from_gguf_metadata(dict(metadata))
        return known or _DEFAULT

    def template(self, *, has_tools: bool, goes_on: bool = False) -> NativeTemplate | None:
        """The model's own template that chats go by, or None where llama_cpp's formats count.

        Those that are known by the template itself cannot go on (`goes_on`) with an answer: it can.
        """
        name = _DEFAULT if goes_on and self.name == self._guessed else self.name
        if self.handler is not None or name is None:
            return None
        if has_tools and name == _DEFAULT and _TOOL_USE in self._native:
            name = _TOOL_USE
        return self._native.get(name)

    @cached_property
    def abilities(self) -> list[str]:
        """What chats by the model's own template can do: "tools", "thinking"."""
        template = self.template(has_tools=True)
        if template is None:
            return []
        try:
            prompt = template.apply([{"role": "user", "content": "Hi"}])
        except ChatError:
            return []
        able = {"tools": prompt.caps["supports_tools"], "thinking": prompt.supports_thinking}
        return [name for name, is_there in able.items() if is_there]


def _native(source: str, bos: str, eos: str, inert: InertTexts) -> NativeTemplate | None:
    try:
        return NativeTemplate(source, bos, eos, inert)
    except ChatError:
        return None


def _templates(metadata: Mapping[str, str]) -> dict[str, str]:
    """The templates in a model's file by the names that llama_cpp has for them."""
    named = {
        name.removeprefix("tokenizer."): text
        for name, text in metadata.items()
        if name.startswith(f"{_TEMPLATE}.")
    }
    default = metadata.get(_TEMPLATE)
    return named if default is None else {**named, _DEFAULT: default}


def _formatted(
    template: NativeTemplate, eos: str, end: int, *, messages: Any, tools: Any = None, **_: Any
) -> llama_chat_format.ChatFormatterResponse:
    """As llama_cpp's formatters write messages; `eos` is the text of the token `end`."""
    prompt = template.apply([dict(message) for message in messages], tools=tools)
    criteria = StoppingCriteriaList([lambda tokens, _logits: tokens[-1] == end])
    stop = [eos, *prompt.stops]
    return llama_chat_format.ChatFormatterResponse(prompt.prompt, stop, criteria, True)


def _jinja(native: Any, source: str, bos: str, eos: str) -> Any:
    """A formatter for a template that llama.cpp cannot read."""
    try:
        return llama_chat_format.Jinja2ChatFormatter(
            template=source, eos_token=eos, bos_token=bos, stop_token_ids=[native.token_eos()]
        )
    except TemplateError as error:
        raise ModelError(
            f"the chat template in {native.path_model} is no Jinja template "
            f"({' '.join(str(error).split())}): use another file of this model"
        ) from error
