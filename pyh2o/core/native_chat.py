"""Bindings of llama.cpp's chat templates and parsers (native/include/llama-h2o-chat.h)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .._native import ffi, lib
from ..errors import ChatError
from .utf8 import utf8

if TYPE_CHECKING:
    from .inert import InertTexts

_CALLS = "tool-calls ::="


@dataclass(frozen=True)
class ChatPrompt:
    """The rendered prompt of a chat, and how to parse the answer.

    Attributes:
        prompt: the prompt, with placeholders for special tokens in messages (`InertTexts`).
        generation_prompt: end of the prompt, which starts the answer.
        grammar_lazy: whether the grammar applies only after one of `triggers`.
        triggers: kind (enum common_grammar_trigger_type) and text of each trigger.
        preserved_tokens: texts of special tokens that are part of the answer.
        thinking_start_tag: tag that starts reasoning, possibly in the generation prompt.
        thinking_end_tags: tags that end reasoning.
        marks: texts that end plain text.
        opening: text that the answer must start with, after its reasoning.
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
        """Parse an answer, which may be incomplete (see `llama_h2o_chat_parse`)."""
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
    """A Jinja chat template, rendered by llama.cpp."""

    def __init__(
        self, source: str, bos: str = "", eos: str = "", inert: InertTexts | None = None
    ) -> None:
        self._inert = inert
        texts = [text.encode(errors="replace") for text in (source, bos, eos)]
        template = _checked(lib.llama_h2o_chat_template_init, *texts)
        self._native = ffi.gc(template, lib.llama_h2o_chat_template_free)

    def apply(self, messages: list[dict[str, Any]], **request: Any) -> ChatPrompt:
        """Render a chat.

        Args:
            messages: in OpenAI's format, with contents as texts or parts of the type "text".
            request: other arguments of `llama_h2o_chat_apply`; None values are ignored.

        Raises:
            ChatError: the template rejects the messages.
            TextError: a text has a lone surrogate.
        """
        given = {name: value for name, value in request.items() if value is not None}
        messages, prompt = self._applied(messages, given)
        if given.get("parallel_tool_calls") is False:
            # if each call has its own tags, llama.cpp's grammar allows any number of calls
            grammar = prompt.grammar.replace(f"{_CALLS} (tool-call space)+", f"{_CALLS} tool-call")
            prompt = replace(prompt, grammar=grammar)
        prompt = replace(prompt, grammar=_with_definitions(prompt.grammar, given.get("tools", [])))
        if self._inert is not None:
            hidden, more = self._inert.hide_messages(messages), self._inert.hide(given)
            if (hidden, more) != (messages, given):
                prompt = replace(prompt, prompt=self._prompt(hidden, more).prompt)
        return prompt

    def _applied(
        self, messages: list[dict[str, Any]], given: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], ChatPrompt]:
        """Return the prompt, and the messages with tool arguments that the template accepts.

        Arguments that are not JSON, such as those of a truncated call, become a JSON string, or an
        object with that string for templates that need an object.
        """
        first_error: ChatError | None = None
        tried: list[dict[str, Any]] | None = None
        for form in range(3):
            converted = [_with_arguments(message, form) for message in messages]
            if converted != tried:
                try:
                    return converted, self._prompt(converted, given)
                except ChatError as error:
                    first_error, tried = first_error or error, converted
        assert first_error is not None
        raise first_error

    def _prompt(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> ChatPrompt:
        text = utf8(json.dumps({"messages": messages, **given}, ensure_ascii=False))
        result = _checked(lib.llama_h2o_chat_apply, self._native, text)
        prompt = ChatPrompt(**json.loads(_text(result)))
        if not given.get("continue_final_message"):
            return prompt
        # llama.cpp keeps the text that templates append to a chat without generation prompt
        call = self._prompt(messages[:-1], {**given, "continue_final_message": False})
        before = call.prompt.removesuffix(call.generation_prompt)
        return replace(prompt, prompt=before + prompt.generation_prompt)


def _with_definitions(grammar: str, tools: list[dict[str, Any]]) -> str:
    """Add the definitions of a tool's schema to the schemas of its arguments in a grammar."""
    lines = grammar.splitlines()
    for number, line in enumerate(lines):
        rule, is_schema, text = line.partition("%json ")
        if not is_schema or '"$ref"' not in text:
            continue
        schema = json.loads(text)
        found = []
        for each in (tool["function"].get("parameters") or {} for tool in tools):
            definitions = {name: each[name] for name in ("$defs", "definitions") if name in each}
            if schema in each.get("properties", {}).values() and definitions not in found:
                found.append(definitions)
        if len(found) > 1:
            raise ChatError(f"several tools define {text[:80]} differently: rename one of them")
        lines[number] = f"{rule}{is_schema}{json.dumps({**schema, **(found or [{}])[0]})}"
    return "\n".join(lines)


def _with_arguments(message: dict[str, Any], form: int) -> dict[str, Any]:
    """Return a message with the arguments of its calls in one of `_forms`."""
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            arguments = _forms(function.get("arguments"))[form]
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def _forms(arguments: Any) -> tuple[Any, Any, Any]:
    """Return the arguments of a call unchanged, as JSON, and as an object; "{}" for none."""
    if arguments in (None, "", "null"):
        return "{}", "{}", "{}"
    value = in_json = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_refused)
            json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        except RecursionError:  # llama.cpp's parser would crash
            raise ChatError("the arguments of a call are nested too deeply") from None
        except ValueError:
            value, in_json = arguments, json.dumps(arguments)
    return arguments, in_json, in_json if isinstance(value, dict) else {"arguments": value}


def _refused(constant: str) -> None:
    raise ValueError(constant)


def _checked(function: Any, *args: Any) -> Any:
    error = ffi.new("char **")
    result = function(*args, error)
    if result != ffi.NULL:
        return result
    if error[0] == ffi.NULL:
        raise MemoryError
    why = " ".join(_text(error[0]).split())
    # the message starts with the location in the template
    raise ChatError(why.rpartition("Error: ")[2].removeprefix("Jinja Exception: "))


def _text(native: Any) -> str:
    text: bytes = ffi.string(native)
    lib.llama_h2o_chat_text_free(native)
    return text.decode(errors="replace")
