"""`Llama.create_chat_completion`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_cpp import Llama as StockLlama

from ..core.utf8 import text_errors
from ..writing.answer import Answer
from ..writing.chat_prompt import answer_grammar, grammar_of_call, prepare
from ..writing.grammar import Grammar
from ..writing.pictures import with_marks
from ..writing.request import Request
from ..writing.thinking import Thinking, refuse_without_template
from .completion import answered, request_of
from .results import Results, usage_json
from .sampling import AnyLlama

# Arguments that llama_cpp does not have.
OURS = ("enable_thinking", "reasoning_budget", "chat_template_kwargs", "parallel_tool_calls")


def chat_completion(
    llama: AnyLlama, given: Mapping[str, Any], ours: Mapping[str, Any], *, continues: bool
) -> Any:
    """Return the result of a chat, or an iterator of the chunks of a stream.

    Args:
        given: arguments of llama_cpp's method.
        ours: arguments among `OURS`.
        continues: whether the last message is the start of the answer.
    """
    model = llama.text.model
    response_format = _as_json_object(given["response_format"])
    if _uses_llama_cpp(llama, given):
        given = {**given, "response_format": response_format}
        return _by_llama_cpp(llama, given, ours)
    top = (given["top_logprobs"] or 0) if given["logprobs"] else None
    schema = None
    if response_format is not None and response_format["type"] == "json_object":
        schema = response_format.get("schema")
        schema = {"type": "object"} if schema is None else schema
    request = request_of(
        llama,
        given,
        messages=given["messages"],
        tools=given["tools"] or (),
        tool_choice=given["tool_choice"],
        parallel_tool_calls=ours.get("parallel_tool_calls"),
        continue_final_message=continues,
        reasoning=Thinking(ours.get("enable_thinking"), ours.get("reasoning_budget")),
        template_arguments=ours.get("chat_template_kwargs"),
        schema=schema,
        top_logprobs=top,
    )
    prompt = prepare(model, request)
    name = llama.model_path if given["model"] is None else given["model"]
    results = Results(name, is_chat=True, top_logprobs=top)

    answer = Answer(llama.text, request, prompt, drafts=llama.draft_model)
    if given["stream"]:
        return results.chunks(answered(llama, answer))
    choice = results.choice(answered(llama, answer))
    return results.result([choice], usage_json(results.usage, with_details=False))


def _as_json_object(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Convert OpenAI's type "json_schema", which llama_cpp ignores, to "json_object"."""
    if response_format is None or response_format.get("type") != "json_schema":
        return response_format
    schema = (response_format.get("json_schema") or {}).get("schema")
    if schema is None:
        raise ValueError(
            'response_format of type "json_schema" has no schema: set '
            'response_format["json_schema"]["schema"]'
        )
    return {"type": "json_object", "schema": schema}


def _uses_llama_cpp(llama: AnyLlama, given: Mapping[str, Any]) -> bool:
    """Whether llama_cpp's own code answers: for handlers, functions and formats with tools."""
    chat = llama.text.model.chat
    has_functions = bool(given["functions"] or given["function_call"])
    has_tools = bool(given["tools"] or given["tool_choice"])
    is_format = chat.handler is None and chat.template(has_tools=has_tools) is None
    return chat.handler is not None or has_functions or (is_format and has_tools)


def _by_llama_cpp(llama: AnyLlama, given: Mapping[str, Any], ours: Mapping[str, Any]) -> Any:
    refuse_without_template(
        **{name: ours.get(name) for name in OURS if name != "parallel_tool_calls"}
    )
    arguments = {name: value for name, value in given.items() if name not in ("self", *OURS)}
    if arguments["logprobs"]:
        arguments["top_logprobs"] = arguments["top_logprobs"] or 0
    inert = llama.text.model.chat.inert
    arguments["messages"] = inert.hide_messages(with_marks(llama.text.model, given["messages"]))
    with text_errors():
        return StockLlama.create_chat_completion(_constrained(llama, given), **arguments)


class _Constrained:
    """A `Llama` whose completions follow a grammar: llama_cpp's own grammars are not strict."""

    def __init__(self, llama: AnyLlama, grammar: Grammar) -> None:
        self._llama, self._grammar = llama, grammar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        return self._llama.create_completion(*args, **{**kwargs, "grammar": self._grammar})


def _constrained(llama: AnyLlama, given: Mapping[str, Any]) -> Any:
    """Return the `Llama`, constrained to the grammar of the answer or of the required call."""
    tools = given["tools"] or [{"function": each} for each in given["functions"] or ()]
    choice = given["tool_choice"] or given["function_call"]
    schema = given["response_format"]
    request = Request(
        tools=tools,
        schema=schema and (schema.get("schema") or {"type": "object"}),
        grammar=given["grammar"],
    )
    grammar = None
    if isinstance(choice, Mapping):
        grammar = grammar_of_call(request, choice.get("function", choice)["name"])
    elif not tools or choice == "none":
        grammar = answer_grammar(request)
    return llama if grammar is None else _Constrained(llama, grammar)
