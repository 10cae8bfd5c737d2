"""How messages become a prompt: the templates in a model's file, or llama_cpp's chat formats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from llama_cpp import llama_chat_format

from ..errors import ChatError, ModelError
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
        handlers: of the templates in the file, by name; for those that llama.cpp cannot read.
        eos: the text of this token; "" if there is none.
    """

    def __init__(self, native: Any, metadata: Mapping[str, str]) -> None:
        """`native` is llama_cpp's internal model.

        Raises:
            ModelError: a template in the file is none.
        """
        self.handler: Any = None
        self._templates = _templates(metadata)
        self._native: dict[str, NativeTemplate | None] = {}
        self._bos, self.eos = (
            native.token_get_text(token) if token != -1 else ""
            for token in (native.token_bos(), native.token_eos())
        )
        self.handlers = _handlers(native, self._templates, self._bos, self.eos)
        self.name: str | None = self._found(metadata)

    def _found(self, metadata: Mapping[str, str]) -> str:
        if _DEFAULT not in self.handlers:
            return _FALLBACK
        known = llama_chat_format.guess_chat_format_from_gguf_metadata(dict(metadata))
        return known or _DEFAULT

    def template(self, *, has_tools: bool) -> NativeTemplate | None:
        """The model's own template that chats go by, or None where llama_cpp's formats count."""
        name = self.name
        if self.handler is not None or name not in self._templates:
            return None
        if has_tools and name == _DEFAULT and _TOOL_USE in self._templates:
            name = _TOOL_USE
        if name not in self._native:
            self._native[name] = _native(self._templates[name], self._bos, self.eos)
        return self._native[name]

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


def _native(source: str, bos: str, eos: str) -> NativeTemplate | None:
    try:
        return NativeTemplate(source, bos, eos)
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


def _handlers(native: Any, templates: Mapping[str, str], bos: str, eos: str) -> dict[str, Any]:
    handlers = {}
    for name, template in templates.items():
        try:
            formatter = llama_chat_format.Jinja2ChatFormatter(
                template=template, eos_token=eos, bos_token=bos, stop_token_ids=[native.token_eos()]
            )
        except TemplateError as error:
            raise ModelError(
                f"the chat template in {native.path_model} is no Jinja template "
                f"({' '.join(str(error).split())}): use another file of this model"
            ) from error
        handlers[name] = formatter.to_chat_handler()
    return handlers
