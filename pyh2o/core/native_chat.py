"""llama.cpp's templates and parsers of chats, as Python: native/include/llama-h2o-chat.h."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .._native import ffi, lib
from ..errors import ChatError
from .utf8 import utf8

_CALLS = "tool-calls ::="


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt that a template makes of a chat, and how to read what is written after it.

    Attributes:
        prompt: with the texts of special tokens.
        generation_prompt: its end, which calls for the answer, or begins it.
        grammar: of the answer; "" for any.
        grammar_lazy: the grammar holds only from one of `triggers` on.
        triggers: llama.cpp's kind (enum common_grammar_trigger_type) and the text of each.
        stops: texts that end the answer.
        preserved_tokens: texts of special tokens that are part of the answer.
        supports_thinking: whether models of this template think.
        thinking_start_tag: what opens thoughts; it may stand in the generation prompt.
        thinking_end_tags: what closes them.
        marks: texts that end a stretch of plain text.
        caps: what the template has a place for.
        opening: what the answer has to begin with, behind its thoughts.
    """

    prompt: str
    generation_prompt: str
    grammar: str
    grammar_lazy: bool
    triggers: list[dict[str, Any]]
    stops: list[str]
    preserved_tokens: list[str]
    supports_thinking: bool
    thinking_start_tag: str
    thinking_end_tags: list[str]
    marks: list[str]
    caps: dict[str, bool]
    format: int
    parser: str
    opening: str = ""

    def parse(self, text: str) -> dict[str, Any]:
        """What is in an answer as far as it was written: `llama_h2o_chat_parse`.

        Raises:
            ChatError: it is nested too deeply.
        """
        data = text.encode(errors="replace")
        result = _checked(lib.llama_h2o_chat_parse, self._native_parser, data, len(data))
        parsed: dict[str, Any] = json.loads(_text(result))
        return parsed

    @cached_property
    def _native_parser(self) -> Any:
        names = ("format", "generation_prompt", "parser")
        params = json.dumps({name: getattr(self, name) for name in names}).encode()
        parser = _checked(lib.llama_h2o_chat_parser_init, params)
        return ffi.gc(parser, lib.llama_h2o_chat_parser_free)


class NativeTemplate:
    """A chat template in Jinja, applied by llama.cpp."""

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        """`bos` and `eos` are the texts of these tokens.

        Raises:
            ChatError: llama.cpp cannot read the template.
        """
        texts = [text.encode(errors="replace") for text in (source, bos, eos)]
        template = _checked(lib.llama_h2o_chat_template_init, *texts)
        self._native = ffi.gc(template, lib.llama_h2o_chat_template_free)

    def apply(self, messages: list[dict[str, Any]], **request: Any) -> ChatPrompt:
        """Call for an answer.

        Args:
            messages: in OpenAI's words, with the contents as texts or parts of the type "text".
            request: what `llama_h2o_chat_apply` takes besides; None counts as not given.

        Raises:
            ChatError: the template refuses it.
            TextError: a text is not Unicode.
        """
        given = {name: value for name, value in request.items() if value is not None}
        text = utf8(json.dumps({"messages": messages, **given}, ensure_ascii=False))
        result = _checked(lib.llama_h2o_chat_apply, self._native, text)
        prompt = ChatPrompt(**json.loads(_text(result)))
        if given.get("parallel_tool_calls") is False:
            # where each call has marks of its own, llama.cpp's grammar has any number of them
            grammar = prompt.grammar.replace(f"{_CALLS} (tool-call space)+", f"{_CALLS} tool-call")
            prompt = replace(prompt, grammar=grammar)
        if not given.get("continue_final_message"):
            return prompt
        # llama.cpp leaves what a template ends a chat with that calls for no answer
        call = self.apply(messages[:-1], **{**given, "continue_final_message": False})
        before = call.prompt.removesuffix(call.generation_prompt)
        return replace(prompt, prompt=before + prompt.generation_prompt)


def _checked(function: Any, *args: Any) -> Any:
    error = ffi.new("char **")
    result = function(*args, error)
    if result != ffi.NULL:
        return result
    if error[0] == ffi.NULL:
        raise MemoryError
    why = " ".join(_text(error[0]).split())
    # before the cause there is where in the template it came up
    raise ChatError(why.rpartition("Error: ")[2].removeprefix("Jinja Exception: "))


def _text(native: Any) -> str:
    text: bytes = ffi.string(native)
    lib.llama_h2o_chat_text_free(native)
    return text.decode(errors="replace")
