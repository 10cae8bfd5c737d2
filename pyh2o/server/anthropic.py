"""Anthropic's messages API."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import model_validator

from .answers import JsonAnswer, models_of
from .bodies import ChatBody, JoinedText, Strict
from .custom_tools import OTHER
from .dialect import Dialect, Refusal, named_event
from .refusals import INTERNAL, wrong_field
from .requests import routes_of
from .served_model import ServedModel
from .written import Block, Written, arguments_of, body_of, written

ERRORS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error",
}  # fmt: skip
NAMES = {
    "response_format": "output_config.format",
    "stop": "stop_sequences", "reasoning_budget": "thinking.budget_tokens",
    "chat_template_kwargs": "thinking",
}  # fmt: skip
# Type of the deltas of each kind of block, and the field that has their text.
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _error(refusal: Refusal) -> dict[str, Any]:
    other = "invalid_request_error" if refusal.status < INTERNAL else "api_error"
    kind = ERRORS.get(refusal.status, other)
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


anthropic_routes = routes_of(Dialect(error=_error, line=named_event))


class _Message(Strict):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class _Tool(Strict):
    type: str = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _function_or_other(cls, data: Any) -> Any:
        match data:
            case {"input_schema": _}:
                return data
            case {"type": str(kind)} if kind != "custom":
                return {"type": OTHER, "name": OTHER, "input_schema": {}}
        return data


class CountBody(Strict):
    """The body of /v1/messages/count_tokens; `ChatBody` validates the values."""

    model: str | None = None
    system: JoinedText | None = None
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None

    def chat(self, **more: Any) -> ChatBody:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [
            each for n, message in enumerate(self.messages) for each in _converted(message, n)
        ]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools or ()
            if tool.type != OTHER
        ]
        choice = _choice(self.tool_choice)
        fields = {"messages": system + messages, "tools": tools, "tool_choice": choice, **more}
        return body_of(ChatBody, fields, NAMES)


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


def _choice(given: dict[str, Any] | None) -> Any:
    match given:
        case None:
            return None
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "any"}:
            return "required"
    return given.get("type")


def _converted(message: _Message, number: int) -> Iterator[dict[str, Any]]:
    """Yield a message as OpenAI's messages: one for each tool result, then the rest."""
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    parts, reasoning, calls, n_results = [], [], [], 0
    for block in blocks:
        match block:
            case {"type": "text", "text": str()} | {"type": "image", "source": {}}:
                parts.append(_part(block))
            case {"type": "tool_use", "id": str(id_), "name": str(name)}:
                function = {"name": name, "arguments": arguments_of(block.get("input"))}
                calls.append({"id": id_, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(id_)}:
                n_results += 1
                content = block.get("content") or ""
                if isinstance(content, list):
                    content = [_part(each) for each in content]
                yield {"role": "tool", "tool_call_id": id_, "content": content}
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                raise wrong_field(
                    f"messages[{number}].content",
                    "unsupported block: use text, image, tool_use or tool_result",
                )
    if parts or calls or not n_results:
        texts = {"content": parts, "reasoning_content": "".join(reasoning) or None}
        yield {"role": message.role, **texts, "tool_calls": calls or None}


def _part(block: Any) -> Any:
    """Return an image block as OpenAI's; other blocks are unchanged."""
    match block:
        case {"type": "image", "source": {"type": "base64", "data": data, **about}}:
            kind = about.get("media_type", "image/png")
            return {"type": "image_url", "image_url": f"data:{kind};base64,{data}"}
        case {"type": "image", "source": {"url": url}}:
            return {"type": "image_url", "image_url": url}
    return block


# ---------------------------------------------------------------------------------------------
# Routes
# ---------------------------------------------------------------------------------------------


@anthropic_routes.post("/v1/messages")
async def _messages(request: Request, body: MessagesBody) -> Response:
    names = {"max_tokens", "stream", "temperature", "top_p", "top_k"}
    wanted = (body.output_config or {}).get("format")
    inner = body.chat(
        **body.model_dump(include=names),
        stop=body.stop_sequences,
        response_format=wanted and {"type": "json_schema", "json_schema": wanted},
        **_thinking(body.thinking),
    )
    return written(request, inner, body.model, _whole, _events)


@anthropic_routes.post("/v1/messages/count_tokens")
async def _count(request: Request, body: CountBody) -> Response:
    inner = body.chat()

    def work(model: ServedModel) -> dict[str, int]:
        return {"input_tokens": model.count_tokens(inner)}

    return JsonAnswer(request, models_of(request).find(body.model, embeds=False), work)


def _thinking(given: dict[str, Any] | None) -> dict[str, Any]:
    match given:
        case {"type": "disabled"}:
            return {"chat_template_kwargs": {"enable_thinking": False}}
        case {"type": "enabled", "budget_tokens": n_tokens}:
            return {"reasoning_budget": n_tokens}
    return {}


def _whole(text: Written) -> dict[str, Any]:
    content = [_block(block, block.text) for block in text.all_blocks()]
    return {**_head(text), "content": content, **_end(text), "usage": _usage(text)}


def _events(text: Written) -> Iterator[dict[str, Any]]:
    parts = text.parts()
    first = next(parts)  # sets the number of prompt tokens
    start: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(text),
    }
    yield {"type": "message_start", "message": {**_head(text), **start}}
    for block, piece in itertools.chain([first], parts):
        index = {"index": len(text.blocks) - 1}
        if piece == "":
            yield {"type": "content_block_start", **index, "content_block": _block(block, "")}
        elif piece is None:
            yield {"type": "content_block_stop", **index}
        else:
            kind, name = DELTAS[block.kind]
            delta = {"type": kind, name: piece}
            yield {"type": "content_block_delta", **index, "delta": delta}
    yield {"type": "message_delta", "delta": _end(text), "usage": _usage(text)}
    yield {"type": "message_stop"}


def _head(text: Written) -> dict[str, Any]:
    about = {"type": "message", "role": "assistant", "model": text.model.name}
    return {"id": f"msg_{secrets.token_hex(12)}", **about}


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "call":
        given = (block.input or {}) if text else {}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _end(text: Written) -> dict[str, Any]:
    reason = "max_tokens" if text.finish == "length" else "end_turn"
    last = text.blocks[-1]
    if last.kind == "call":
        reason = "max_tokens" if last.input is None else "tool_use"
    elif text.stop:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": text.stop}


def _usage(text: Written) -> dict[str, int]:
    usage = text.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.sampled,
    }
