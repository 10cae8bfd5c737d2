"""Chats by a model's own template: thoughts and calls of tools apart from what is said.

The results are llama_cpp's, with `reasoning_content` and `tool_calls` as servers of OpenAI's routes
have them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llama_cpp import StoppingCriteriaList
from llama_cpp.llama_chat_format import _convert_text_completion_logprobs_to_chat

from ..core.drawn import NotedText
from ..core.native_chat import ChatPrompt, NativeTemplate
from ..errors import ChatError, SettingsError
from ..writing.chat_guide import WORD, ChatGuide, shown_tokens
from ..writing.chat_parser import ChatParser, Delta
from ..writing.grammar import Grammar, grammar_of
from ..writing.thinking import Thinking, refuse_without_template
from .drawing import MORE

if TYPE_CHECKING:
    from ..core.model import Model
    from .llama import Llama

# Arguments that go on to the completion as they are.
_DRAWING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "stream", "seed", "max_tokens",
    "presence_penalty", "frequency_penalty", "repeat_penalty", "tfs_z", "mirostat_mode",
    "mirostat_tau", "mirostat_eta", "model", "logits_processor", "logit_bias",
)  # fmt: skip
# Those that llama_cpp does not have.
OURS = ("enable_thinking", "reasoning_budget", "chat_template_kwargs", "parallel_tool_calls")


def chat_prompt(
    model: Model, given: Mapping[str, Any], *, goes_on: bool = False
) -> ChatPrompt | None:
    """The prompt of a chat by the model's own template; None where llama_cpp's formats make it.

    These do where the user chose one, for llama_cpp's older functions, and for a call that has to
    be made by a model whose template has no place for tools.

    Args:
        given: the arguments of `Llama.create_chat_completion`.
        goes_on: whether the last message is the beginning of the answer.

    Raises:
        ChatError: the template refuses it.
        GrammarError: no grammar can be made of the schema of a tool, or of the answer.
        ValueError: the tool to call is none of the tools, or the last message cannot go on.
    """
    tools, choice = given.get("tools") or None, given.get("tool_choice")
    template = model.chat.template(has_tools=tools is not None, goes_on=goes_on)
    if goes_on:
        _check_goes_on(given, template)
    if template is None or given.get("functions") or given.get("function_call"):
        return None
    messages: list[dict[str, Any]] = [dict(message) for message in given["messages"]]
    request: dict[str, Any] = {name: given[name] for name in _REQUEST if name in given}
    if goes_on:
        request["continue_final_message"] = True
    thinking = Thinking(given.get("enable_thinking"), given.get("reasoning_budget"))
    if choice != "none":
        for number, tool in enumerate(tools or ()):
            _grammar_of_arguments(number, tool)  # refused before anything is written
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        tools = [tool for tool in tools or () if tool["function"]["name"] == name]
        if not tools:
            raise ValueError(f"Tool choice '{name}' not found in tools.")
        choice = "required"
    if choice != "required" and (given.get("grammar") or _wants_json(given)):
        choice = "none"  # what was asked for leaves no place for a call
    if tools is not None:
        request.update(tools=tools, tool_choice=choice or "auto")
    if choice == "required" and request.get("parallel_tool_calls") is None:
        request["parallel_tool_calls"] = False  # small models would call without end
    prompt = thinking.prompt(template, messages, **request)
    if choice == "required":
        if prompt.grammar and prompt.caps["supports_tool_calls"]:
            auto = thinking.prompt(template, messages, **{**request, "tool_choice": "auto"})
            return replace(prompt, opening=_opening(prompt, auto.triggers))
        if given["tool_choice"] == "required":
            raise SettingsError(
                "tool_choice: the model's chat template has no place for tools: name the function "
                "that is to be called"
            )
        return None
    if goes_on and not messages[-1].get("content") and not prompt.thinking_start_tag:
        raise ValueError(
            "the model's chat template has no thoughts to go on with: let the last message have a "
            "content, too"
        )
    if prompt.supports_thinking and _wants_json(given):
        _answer_grammar(given)  # which is stricter
        schema = _schema(given["response_format"])
        prompt = thinking.prompt(template, messages, **request, json_schema=schema)
    return prompt


def _grammar_of_arguments(number: int, tool: Mapping[str, Any]) -> Grammar:
    """What calls of a tool have to follow; `number` is its place in the list of tools.

    As OpenAI's clients expect, only a tool that is "strict" is refused for a keyword that is not
    known; calls of another may break what the keyword says.

    Raises:
        GrammarError: no grammar can be made of its parameters.
    """
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object"}
    field = f"tools[{number}].function.parameters"
    return Grammar.of_schema(schema, field, is_strict=bool(function.get("strict")))


def _opening(prompt: ChatPrompt, triggers: list[dict[str, Any]]) -> str:
    """What calls begin with, of what makes their grammar hold: a small model may never write it."""
    words = (each["value"] for each in triggers if each["type"] == WORD)
    return next((word for word in words if prompt.parse(word)["content"] == ""), "")


def _check_goes_on(given: Mapping[str, Any], template: NativeTemplate | None) -> None:
    """Refuse an answer that cannot go on, with a ValueError."""
    last = given["messages"][-1] if given["messages"] else {}
    content = last.get("content") or last.get("reasoning_content")
    if last.get("role") != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
        raise ValueError(
            "only an answer can be continued: let the last message be a text of the assistant's, "
            "or leave continue_final_message out"
        )
    has_to_call = given.get("tool_choice") not in (None, "auto", "none")
    if has_to_call or _wants_json(given) or given.get("functions") or given.get("function_call"):
        raise ValueError(
            "an answer that is begun cannot be held to a schema: let the last message be the "
            "user's, or leave response_format and tool_choice out"
        )
    if template is None:
        raise ValueError(
            "only the template of a model's file can go on with an answer: let the last message be "
            "the user's, or give no chat_format"
        )


_REQUEST = ("chat_template_kwargs", "parallel_tool_calls")


def _wants_json(given: Mapping[str, Any]) -> bool:
    wanted = given.get("response_format")
    return wanted is not None and wanted["type"] == "json_object"


def _schema(response_format: Mapping[str, Any]) -> Any:
    schema = response_format.get("schema")
    return {"type": "object"} if schema is None else schema


def _answer_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """What all of the answer has to follow."""
    if _wants_json(given):
        return Grammar.of_schema(_schema(given["response_format"]), "response_format")
    return grammar_of(given["grammar"]) if given.get("grammar") else None


class HeldTo:
    """A `Llama` whose completions follow a grammar, for llama_cpp's formats of chats.

    They make grammars themselves, which let through what a schema forbids.
    """

    def __init__(self, llama: Any, grammar: Grammar) -> None:
        self._llama, self._grammar = llama, grammar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The completion of the `Llama`."""
        return self._llama.create_completion(*args, **{**kwargs, "grammar": self._grammar})


def held_to_grammar(llama: Any, given: Mapping[str, Any]) -> Any:
    """The `Llama`, held to what these arguments of `create_chat_completion` say of the answer.

    Raises:
        GrammarError: no grammar can be made of it.
    """
    tools = given.get("tools") or [{"function": each} for each in given.get("functions") or ()]
    choice = given.get("tool_choice") or given.get("function_call")
    grammar = None
    if isinstance(choice, Mapping):
        name = choice.get("function", choice)["name"]
        for number, tool in enumerate(tools):
            if tool["function"]["name"] == name:
                grammar = _grammar_of_arguments(number, tool)
    elif not tools or choice == "none":
        grammar = _answer_grammar(given)
    return llama if grammar is None else HeldTo(llama, grammar)


def chat_completion(
    llama: Llama, model: Model, prompt: ChatPrompt, given: Mapping[str, Any]
) -> Any:
    """The answer to a prompt: a result, or an iterator of the chunks of a stream.

    Args:
        llama: that writes it, with the model.
        prompt: `chat_prompt` of the arguments.
        given: the arguments of `Llama.create_chat_completion`.
    """
    grammar = None if prompt.grammar else _answer_grammar(given)
    budget = Thinking(budget=given.get("reasoning_budget")).limit
    guide: Grammar | ChatGuide | None = grammar
    has_marks = bool(prompt.grammar) or prompt.supports_thinking
    if has_marks or budget is not None:
        guide = ChatGuide(model, prompt, grammar=grammar, budget=budget)
    end = int(model.native.token_eos())
    stop = given.get("stop") or []
    arguments: dict[str, Any] = {
        **{name: given[name] for name in (*_DRAWING, *MORE) if name in given},
        "stop": [*([stop] if isinstance(stop, str) else stop), model.chat.eos, *prompt.stops],
        "stopping_criteria": StoppingCriteriaList([lambda tokens, _logits: tokens[-1] == end]),
        "logprobs": given.get("top_logprobs") if given.get("logprobs") else None,
        "grammar": guide,
        "shown": shown_tokens(model, prompt) if prompt.marks else frozenset(),
        "on_noted": (noted := list[NotedText]()).append,
    }
    tokens = llama.tokenize(prompt.prompt.encode(), add_bos=False, special=True)
    completion = llama.create_completion(tokens, **arguments)
    parser = ChatParser(prompt, _callable(given))

    def note() -> None:
        for each in noted:
            _note_rendered(model, given, parser, each)

    make: Callable[..., Any] = _chunks if given.get("stream") else _result
    return make(completion, parser, note)


def _note_rendered(
    model: Model, given: Mapping[str, Any], parser: ChatParser, noted: NotedText
) -> None:
    """Note how the answer will stand in the history, where that is not as it was drawn.

    Calls are rendered by the template, and the parser and clients strip contents.
    """
    message, content = _message(parser), parser.content.strip()
    if not parser.calls and not parser.is_trimmed and content == parser.content:
        return
    thought = parser.thought.strip().encode()
    if thought not in model.detokenize(noted.tokens[noted.n_prompt :]):  # it was forgotten
        del message["reasoning_content"]
        thought = b""
    longer = [*given["messages"], {**message, "content": content}]
    for call in parser.calls:
        longer.append({"role": "tool", "tool_call_id": call.id, "content": "?"})
    if not parser.calls:
        longer.append({"role": "user", "content": "?"})
    with contextlib.suppress(ChatError):
        prompt = chat_prompt(model, {**given, "messages": longer})
        if prompt is not None:
            tokens = model.tokenize(prompt.prompt.encode(), add_bos=False, special=True)
            model.drawn.note_rendered(model, noted, tokens, thought)


def _callable(given: Mapping[str, Any]) -> list[str]:
    """The names of the functions that may be called in a fenced block."""
    is_free = given.get("tool_choice") in (None, "auto")
    if not is_free or given.get("grammar") or _wants_json(given):
        return []
    return [tool["function"]["name"] for tool in given.get("tools") or ()]


def refuse_ours(given: Mapping[str, Any]) -> None:
    """Refuse what only a template of the file has, with a SettingsError; others call one tool."""
    ours = {name: given.get(name) for name in OURS if name != "parallel_tool_calls"}
    refuse_without_template(**ours)


# ---------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------


def _message(parser: ChatParser) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parser.content}
    if parser.thought:
        message["reasoning_content"] = parser.thought
    if parser.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parser.calls
        ]
        message["content"] = parser.content or None
    return message


def _result(
    completion: dict[str, Any], parser: ChatParser, at_end: Callable[[], None]
) -> dict[str, Any]:
    [choice] = completion["choices"]
    parser.add(choice["text"])
    parser.end()
    at_end()
    return {
        **completion,
        "id": "chat" + completion["id"],
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": _message(parser),
                "logprobs": _convert_text_completion_logprobs_to_chat(choice["logprobs"]),
                "finish_reason": _finish(choice["finish_reason"], parser),
            }
        ],
    }


def _chunks(
    chunks: Iterator[dict[str, Any]], parser: ChatParser, at_end: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    logprobs: dict[str, Any] | None = None
    for number, chunk in enumerate(chunks):
        [choice] = chunk["choices"]
        head = {
            "id": "chat" + chunk["id"],
            "model": chunk["model"],
            "created": chunk["created"],
            "object": "chat.completion.chunk",
        }
        if number == 0:
            yield _chunk(head, {"role": "assistant"})
        finish = choice["finish_reason"]
        deltas = parser.add(choice["text"]) if finish is None else parser.end()
        if finish is not None:
            at_end()
        if not deltas and finish is None and not choice["text"]:
            deltas = [Delta()]  # as llama_cpp, for a token without text
        logprobs = _joined(logprobs, choice["logprobs"])
        for delta in deltas:
            yield _chunk(head, _delta(delta), logprobs)
            logprobs = None
        if finish is not None:
            yield _chunk(head, {}, logprobs, _finish(finish, parser))


def _chunk(
    head: dict[str, Any],
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish: str | None = None,
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return {**head, "choices": [choice]}


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.call is None:
        return {"reasoning_content": delta.thought} if delta.thought else {"content": delta.content}
    about: dict[str, Any] = {"id": delta.id, "type": "function"} if delta.id else {}
    name = {"name": delta.name} if delta.id else {}
    function = {**name, "arguments": delta.arguments}
    return {"tool_calls": [{"index": delta.call, **about, "function": function}]}


def _joined(before: dict[str, Any] | None, more: Any) -> dict[str, Any] | None:
    """Log probabilities of tokens whose text was held back, with those of the next ones."""
    now: dict[str, Any] | None = _convert_text_completion_logprobs_to_chat(more)
    if before is None or now is None:
        return before or now
    return {**now, "content": [*before["content"], *now["content"]]}


def _finish(finish: str, parser: ChatParser) -> str:
    return "tool_calls" if finish == "stop" and parser.calls else finish
