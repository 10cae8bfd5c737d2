"""llama.cpp's templates and parsers of chats, as Python: native/include/llama-h2o-chat.h."""

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
    """The prompt that a template makes of a chat, and how to read what is written after it.

    Attributes:
        prompt: with the texts of special tokens, and words for those that somebody wrote
            (`InertTexts`).
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

    def __init__(
        self, source: str, bos: str = "", eos: str = "", inert: InertTexts | None = None
    ) -> None:
        """Read a template.

        Args:
            source: in Jinja.
            bos, eos: the texts of these tokens.
            inert: of the model; None to leave messages as they are.

        Raises:
            ChatError: llama.cpp cannot read the template.
        """
        self._inert = inert
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
        messages, prompt = self._applied(messages, given)
        if given.get("parallel_tool_calls") is False:
            # where each call has marks of its own, llama.cpp's grammar has any number of them
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
        """The prompt, and the messages with arguments of calls in a form that the template takes.

        Arguments that are not JSON, such as those of a call that was cut, become a string in JSON
        where the template wants JSON, and an object with that string where it wants an object.
        """
        refusal: ChatError | None = None
        tried: list[dict[str, Any]] | None = None
        for form in range(3):
            told = [_with_arguments(message, form) for message in messages]
            if told != tried:
                try:
                    return told, self._prompt(told, given)
                except ChatError as error:
                    refusal, tried = refusal or error, told
        assert refusal is not None
        raise refusal

    def _prompt(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> ChatPrompt:
        text = utf8(json.dumps({"messages": messages, **given}, ensure_ascii=False))
        result = _checked(lib.llama_h2o_chat_apply, self._native, text)
        prompt = ChatPrompt(**json.loads(_text(result)))
        if not given.get("continue_final_message"):
            return prompt
        # llama.cpp leaves what a template ends a chat with that calls for no answer
        call = self._prompt(messages[:-1], {**given, "continue_final_message": False})
        before = call.prompt.removesuffix(call.generation_prompt)
        return replace(prompt, prompt=before + prompt.generation_prompt)


def _with_definitions(grammar: str, tools: list[dict[str, Any]]) -> str:
    """A grammar of calls in which schemas of single arguments have the definitions of their tool.

    Raises:
        ChatError: several tools have such an argument, and define it differently.
    """
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
    """A message with the arguments of its calls in one of `_forms`."""
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            arguments = _forms(function.get("arguments"))[form]
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def _forms(arguments: Any) -> tuple[Any, Any, Any]:
    """The arguments of a call as they are, as JSON, and as an object; no arguments are `{}`."""
    if arguments in (None, "", "null"):
        return "{}", "{}", "{}"
    value = in_json = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_refused)
            json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        except RecursionError:  # of llama.cpp's parser it ends the program
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
    # before the cause there is where in the template it came up
    raise ChatError(why.rpartition("Error: ")[2].removeprefix("Jinja Exception: "))


def _text(native: Any) -> str:
    text: bytes = ffi.string(native)
    lib.llama_h2o_chat_text_free(native)
    return text.decode(errors="replace")
