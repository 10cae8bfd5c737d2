"""Prepares a request: the tokens of its prompt, and the grammar of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llama_cpp import LlamaGrammar

from ..core.model import Model
from ..core.native_chat import ChatPrompt, NativeTemplate
from ..core.sampled import is_text
from ..core.utf8 import utf8
from ..errors import SettingsError
from .chat_guide import WORD, ChatGuide, shown_tokens
from .chat_parser import ChatParser
from .grammar import Grammar, grammar_of
from .pictures import with_marks
from .prompt import prompt_tokens
from .rendering import format_messages
from .request import Request
from .thinking import USUAL, Thinking, refuse_without_template

_NO_LOGITS = np.empty(0, dtype=np.single)


@dataclass(frozen=True)
class Prompt:
    """A prepared request.

    Attributes:
        tokens: tokens of the prompt.
        text: text of a chat's prompt, with placeholders for special tokens in messages.
        add_bos: whether BOS comes before this text.
        is_text: whether the tokens stand for a text, so that the tokens that the model sampled for
            the same text may replace them.
        stops: strings that end the answer.
        guide: grammar of the answer; it has the state of one answer, so it is used once.
        shown: control tokens whose texts are part of the answer.
        chat: how the answer is parsed; None for plain text.
        call: name of the function, if the whole answer is its arguments; "" otherwise.
        callable: names of functions that may be called in a fenced block.
        ends: returns whether a token ends the answer, in addition to the vocabulary's end tokens.
    """

    tokens: list[int]
    is_text: bool
    text: str = ""
    add_bos: bool = False
    stops: Sequence[bytes] = ()
    guide: Grammar | LlamaGrammar | ChatGuide | None = None
    shown: frozenset[int] = frozenset()
    chat: ChatPrompt | None = None
    call: str = ""
    callable: Sequence[str] = ()
    ends: Callable[[int], bool] = lambda token: False

    def parser(self) -> ChatParser | None:
        """Return a parser of the answer; None if all text is content."""
        return None if self.chat is None else ChatParser(self.chat, self.callable)


def prepare(model: Model, request: Request) -> Prompt:
    """Return the prompt of a request; texts that the model has sampled keep their tokens.

    Raises:
        PyH2OError, ValueError: as `rendered` does.
    """
    prompt = rendered(model, request)
    tokens = prompt.tokens
    if request.messages is not None:
        tokens = model.tokenize(prompt.text.encode(), add_bos=prompt.add_bos, special=True)
    if prompt.is_text:
        tokens = model.sampled_texts.as_sampled(model, tokens)
    return replace(prompt, tokens=tokens)


def rendered(model: Model, request: Request) -> Prompt:
    """Return the prompt of a request; that of a chat as text, without tokens.

    Raises:
        ChatError: the chat template refuses the messages.
        GrammarError: a schema of the answer or of a tool is invalid or not supported.
        PictureError: a picture cannot be read, or the model has no projector.
        SettingsError: an option needs a chat template, which the model's file does not have.
        TextError: a text is not valid Unicode.
        ValueError: the tool to call is not among the tools, or the last message cannot be
            continued.
    """
    if request.messages is None:
        tokens = prompt_tokens(model, request.prompt, request.suffix)
        prompt = Prompt(tokens, is_text(request.prompt, request.suffix), guide=request.grammar)
    else:
        prompt = _chat_prompt(model, request)
    return replace(prompt, stops=[*request.stops, *prompt.stops])


def prompt_for_message(
    model: Model, message: str, reasoning: Thinking = USUAL
) -> tuple[list[int], list[str]]:
    """Return the tokens of a chat with one message, and the strings that end its answer.

    Raises:
        PyH2OError: as `prepare` does.
    """
    messages = [{"role": "user", "content": message}]
    prompt = prepare(model, Request(messages=messages, reasoning=reasoning))
    return prompt.tokens, [stop.decode() for stop in prompt.stops]


def history_tokens(
    model: Model, request: Request, answer: Mapping[str, Any], *more: Mapping[str, Any]
) -> list[int]:
    """Return the tokens of a chat whose messages continue with an answer and `more`.

    Empty if the model's file has no chat template.

    Raises:
        ChatError: the chat template refuses the messages.
    """
    messages = [*(request.messages or ()), answer, *more]
    template = model.chat.template(has_tools=bool(request.tools))
    if template is None:
        return []
    text = _applied(template, replace(request, messages=messages))[0].prompt
    return model.tokenize(text.encode(), add_bos=False, special=True)


# -------------------------------------------------------------------------------------------------
# Chats
# -------------------------------------------------------------------------------------------------


def _chat_prompt(model: Model, request: Request) -> Prompt:
    continues = request.continue_final_message
    template = model.chat.template(has_tools=bool(request.tools), goes_on=continues)
    if continues:
        _check_continued(request, template)
    request = replace(request, messages=with_marks(model, request.messages or ()))
    if template is None:
        return _formatted(model, request)
    if request.tool_choice != "none":
        for number, tool in enumerate(request.tools):
            _grammar_of_arguments(number, tool)  # reports errors before a token is sampled
    chat, call = _applied(template, request)
    grammar = answer_grammar(request) if not chat.grammar else None
    if call:
        grammar, chat = grammar_of_call(request, call), replace(chat, grammar="")
    budget = request.reasoning.limit
    guide: Grammar | LlamaGrammar | ChatGuide | None = grammar
    if chat.grammar or chat.supports_thinking or budget is not None:
        guide = ChatGuide(model, chat, grammar=grammar, budget=budget)
    eos = int(model.native.token_eos())
    is_free = request.tool_choice in (None, "auto") and not _is_held(request)
    return Prompt(
        [],
        is_text=True,
        text=chat.prompt,
        stops=[stop.encode() for stop in (model.chat.eos, *chat.stops) if stop],
        guide=guide,
        shown=shown_tokens(model, chat) if chat.marks else frozenset(),
        chat=chat,
        call=call,
        callable=[tool["function"]["name"] for tool in request.tools] if is_free else [],
        ends=lambda token: token == eos,
    )


def _applied(template: NativeTemplate, request: Request) -> tuple[ChatPrompt, str]:
    """Return the prompt by a chat template, and the function to call.

    The function is "" unless a call is required and the template does not support tools.
    """
    messages = [dict(message) for message in request.messages or ()]
    tools, choice = list(request.tools), request.tool_choice
    given: dict[str, Any] = {
        "chat_template_kwargs": request.template_arguments or None,
        "parallel_tool_calls": request.parallel_tool_calls,
        "continue_final_message": request.continue_final_message or None,
    }
    name = ""
    if isinstance(choice, Mapping):
        name, choice = choice["function"]["name"], "required"
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ValueError(f"Tool choice '{name}' not found in tools.")
    if choice != "required" and _is_held(request):
        choice = "none"  # an answer that follows a schema cannot contain a call
    if tools:
        given |= {"tools": tools, "tool_choice": choice or "auto"}
    if choice == "required" and request.parallel_tool_calls is None:
        given["parallel_tool_calls"] = False  # small models would never stop calling
    thinking = request.reasoning
    prompt = thinking.prompt(template, messages, **given)
    if choice == "required":
        auto = thinking.prompt(template, messages, **{**given, "tool_choice": "auto"})
        if prompt.grammar and prompt.caps["supports_tool_calls"]:
            return replace(prompt, opening=_opening(prompt, auto.triggers)), ""
        if not name:
            raise SettingsError(
                "tool_choice: the model's chat template does not support tools: give the name of "
                "the function to call"
            )
        return auto, name
    if (
        request.continue_final_message
        and not messages[-1].get("content")
        and not prompt.thinking_start_tag
    ):
        raise ValueError(
            "the model's chat template does not support reasoning: give the last message content "
            "to continue"
        )
    if prompt.supports_thinking and request.schema is not None:
        answer_grammar(request)  # its checks are stricter than the template's
        prompt = thinking.prompt(template, messages, **given, json_schema=request.schema)
    return prompt, ""


def _formatted(model: Model, request: Request) -> Prompt:
    """Return the prompt of a chat by a format of llama_cpp's, without tools and reasoning."""
    refuse_without_template(
        enable_thinking=request.reasoning.enabled,
        reasoning_budget=request.reasoning.budget,
        chat_template_kwargs=request.template_arguments,
    )
    call, choice = "", request.tool_choice
    if isinstance(choice, Mapping):
        call = choice["function"]["name"]
    elif choice == "required":
        raise SettingsError(
            "tool_choice: the model has no chat template: give the name of the function to call"
        )
    messages = [dict(message) for message in request.messages or ()]
    utf8(json.dumps(messages, ensure_ascii=False))
    made = format_messages(model.chat, messages)
    criteria = made.stopping_criteria
    return Prompt(
        [],
        is_text=True,
        text=made.text,
        add_bos=made.add_bos,
        stops=[stop.encode() for stop in made.stops if stop],
        guide=grammar_of_call(request, call) if call else answer_grammar(request),
        call=call,
        ends=lambda token: (
            criteria is not None and bool(criteria(np.array([token], np.intc), _NO_LOGITS))
        ),
    )


def _check_continued(request: Request, template: NativeTemplate | None) -> None:
    """Raise a ValueError if the last message cannot be continued."""
    last = request.messages[-1] if request.messages else {}
    content = last.get("content") or last.get("reasoning_content")
    if last.get("role") != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
        raise ValueError(
            "continue_final_message needs a last message from the assistant, with text and without "
            "tool calls: add one, or omit continue_final_message"
        )
    if request.tool_choice not in (None, "auto", "none") or request.schema is not None:
        raise ValueError(
            "an answer that continues the last message cannot follow a schema: end with a user "
            "message, or omit response_format and tool_choice"
        )
    if template is None:
        raise ValueError(
            "only the chat template of the model's file can continue an answer: end with a user "
            "message, or omit chat_format"
        )


# -------------------------------------------------------------------------------------------------
# Grammars
# -------------------------------------------------------------------------------------------------


def _is_held(request: Request) -> bool:
    """Whether the whole answer must follow a grammar."""
    return request.schema is not None or bool(request.grammar)


def answer_grammar(request: Request) -> Grammar | None:
    if request.schema is not None:
        return Grammar.of_schema(request.schema, "response_format")
    return grammar_of(request.grammar) if request.grammar else None


def grammar_of_call(request: Request, name: str) -> Grammar:
    """Return the grammar of the arguments of a function.

    Raises:
        GrammarError: the schema of its parameters is invalid or not supported.
        ValueError: no tool has this name.
    """
    for number, tool in enumerate(request.tools):
        if tool["function"]["name"] == name:
            return _grammar_of_arguments(number, tool)
    raise ValueError(f"Tool choice '{name}' not found in tools.")


def _grammar_of_arguments(number: int, tool: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a tool's arguments; `number` is the index of the tool.

    As in OpenAI's API, unknown keywords of the schema are errors in "strict" tools only.
    """
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object"}
    field = f"tools[{number}].function.parameters"
    return Grammar.of_schema(schema, field, is_strict=bool(function.get("strict")))


def _opening(prompt: ChatPrompt, triggers: list[dict[str, Any]]) -> str:
    """Return the text that starts a call, to force it: small models may never write it."""
    words = (each["value"] for each in triggers if each["type"] == WORD)
    return next((word for word in words if prompt.parse(word)["content"] == ""), "")
