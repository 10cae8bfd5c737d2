"""Chat formats: the templates in a model's file, or llama_cpp's formats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

from llama_cpp import StoppingCriteriaList, llama_chat_format

from ..errors import ChatError, PyH2OError, UnsupportedModelError
from .inert import InertTexts
from .native_chat import NativeTemplate

# Metadata key of the template, and prefix of the keys of named templates.
_TEMPLATE = "tokenizer.chat_template"
_DEFAULT = "chat_template.default"
_TOOL_USE = "chat_template.tool_use"
# For models without a template, as in llama_cpp.
_FALLBACK = "llama-2"

_Error = TypeVar("_Error", bound=PyH2OError)


class ChatFormats:
    """The chat format of a model, and handlers for the templates in its file.

    Attributes:
        name: name of the format: a key of `handlers`, or one of llama_cpp's. None with a handler.
        handler: the user's chat handler, which takes precedence over `name`.
        handlers: handlers of the templates in the file, by name.
    """

    def __init__(self, native: Any, metadata: Mapping[str, str]) -> None:
        self.handler: Any = None
        bos, self.eos = (
            native.token_get_text(token) if token != -1 else ""
            for token in (native.token_bos(), native.token_eos())
        )
        templates = _templates(metadata)
        self.inert = InertTexts(native, list(templates.values()))
        self._native = {
            name: _read(text, bos, self.eos, self.inert) for name, text in templates.items()
        }
        self.handlers: dict[str, Any] = {}
        for name, template in self._native.items():
            if isinstance(template, NativeTemplate):
                formatter = partial(_formatted, template, self.eos, native.token_eos())
                handler = llama_chat_format.chat_formatter_to_chat_completion_handler(formatter)
                self.handlers[name] = handler
        self.name: str | None = _FALLBACK
        if _DEFAULT in self._native:
            known = llama_chat_format.guess_chat_format_from_gguf_metadata(dict(metadata))
            self.name = known or _DEFAULT
        self._guessed = self.name

    def template(self, *, has_tools: bool, goes_on: bool = False) -> NativeTemplate | None:
        """Return the template of the model to use; None for llama_cpp's formats.

        To continue an answer (`goes_on`), the template is used even if llama_cpp has a format for
        it, as these formats cannot continue answers.
        """
        name = _DEFAULT if goes_on and self.name == self._guessed else self.name
        if self.handler is not None or name is None:
            return None
        if has_tools and name == _DEFAULT and _TOOL_USE in self._native:
            name = _TOOL_USE
        template = self._native.get(name)
        if isinstance(template, ChatError):
            raise with_format_advice(
                UnsupportedModelError(
                    f"the model's chat template cannot be used ({template}): use another model file"
                )
            )
        return template

    @cached_property
    def abilities(self) -> list[str]:
        """The features of the model's template: "tools", "thinking"."""
        try:
            template = self.template(has_tools=True)
            if template is None:
                return []
            prompt = template.apply([{"role": "user", "content": "Hi"}])
        except PyH2OError:
            return []
        able = {"tools": prompt.caps["supports_tools"], "thinking": prompt.supports_thinking}
        return [name for name, is_there in able.items() if is_there]


def with_format_advice(error: _Error) -> _Error:
    """Add advice for Python programs, as a note below the traceback."""
    vars(error)["__notes__"] = ["Llama(chat_format=...) takes another format, such as 'chatml'"]
    return error


def _read(source: str, bos: str, eos: str, inert: InertTexts) -> NativeTemplate | ChatError:
    """Return a template, or the error for chats if llama.cpp cannot use it."""
    try:
        return NativeTemplate(source, bos, eos, inert)
    except ChatError as error:
        return error


def _templates(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the templates in a model's file, by llama_cpp's names."""
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
    """Format messages as llama_cpp's formatters do; `eos` is the text of the token `end`."""
    prompt = template.apply([dict(message) for message in messages], tools=tools)
    criteria = StoppingCriteriaList([lambda tokens, _logits: tokens[-1] == end])
    stop = [eos, *prompt.stops]
    return llama_chat_format.ChatFormatterResponse(prompt.prompt, stop, criteria, True)
