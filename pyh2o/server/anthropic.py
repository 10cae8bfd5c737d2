"""Anthropic's messages, as its own client asks for them."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .answers import Answer, models_of
from .bodies import ChatBody, Strict, Text
from .dialect import Dialect, named_event
from .refusals import INTERNAL, RefusedError, wrong_field
from .requests import CheckedRoute
from .served_model import ServedModel
from .written import Written, body_of, written

ERRORS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error",
}  # fmt: skip
NAMES = {"stop": "stop_sequences"}
# Blocks of what was thought, which no later answer needs.
THOUGHTS = ("thinking", "redacted_thinking")


def _error(refusal: RefusedError) -> dict[str, Any]:
    other = "invalid_request_error" if refusal.status < INTERNAL else "api_error"
    kind = ERRORS.get(refusal.status, other)
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


class _Route(CheckedRoute):
    dialect = Dialect(error=_error, line=named_event)


anthropic_routes = APIRouter(route_class=_Route)


class _Message(Strict):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class _Tool(Strict):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class CountBody(Strict):
    """The body of /v1/messages/count_tokens; other fields are those of chats, checked there."""

    model: str | None = None
    system: Text | None = None
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None

    def chat(self, **more: Any) -> ChatBody:
        """The same in OpenAI's words.

        Raises:
            RefusedError: something is wrong with it.
        """
        if self.messages and self.messages[-1].role == "assistant":
            raise wrong_field(
                "messages", "no answer is begun for the model here: let the last one be the user's"
            )
        system = [{"role": "system", "content": self.system}] if self.system else []
        said = [each for n, message in enumerate(self.messages) for each in _said(message, n)]
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
        ]
        choice = _choice(self.tool_choice)
        fields = {"messages": system + said, "tools": tools, "tool_choice": choice, **more}
        return body_of(ChatBody, fields, NAMES)


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
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


def _said(message: _Message, number: int) -> Iterator[dict[str, Any]]:
    """A message in OpenAI's words, which has one of its own for each result of a tool."""
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    parts, calls, n_results = [], [], 0
    for block in blocks:
        match block:
            case {"type": "text", "text": str()} | {"type": "image", "source": {}}:
                parts.append(_part(block))
            case {"type": "tool_use", "id": str(id_), "name": str(name), "input": given}:
                function = {"name": name, "arguments": json.dumps(given)}
                calls.append({"id": id_, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(id_)}:
                n_results += 1
                content = block.get("content") or ""
                if isinstance(content, list):
                    content = [_part(each) for each in content]
                yield {"role": "tool", "tool_call_id": id_, "content": content}
            case {"type": kind} if kind in THOUGHTS:
                pass
            case _:
                raise wrong_field(
                    f"messages[{number}].content",
                    "give blocks of text, image, tool_use or tool_result: no others are read",
                )
    if parts or calls or not n_results:
        yield {"role": message.role, "content": parts, "tool_calls": calls or None}


def _part(block: Any) -> Any:
    """A block in OpenAI's words, if it is a picture that came along."""
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
    )
    return written(request, inner, body.model, _whole, _events)


@anthropic_routes.post("/v1/messages/count_tokens")
async def _count(request: Request, body: CountBody) -> Response:
    inner = body.chat()

    def work(model: ServedModel) -> dict[str, int]:
        return {"input_tokens": model.count_tokens(inner)}

    return Answer(request, models_of(request).find(body.model, embeds=False), work)


def _whole(text: Written) -> dict[str, Any]:
    content = text.text()
    block, end = _block(text), _end(text, content)
    block |= {"input": _input(content) or {}} if text.tool else {"text": content}
    return {**_head(text), "content": [block], **end, "usage": _usage(text)}


def _events(text: Written) -> Iterator[dict[str, Any]]:
    pieces = iter(text)
    first = next(pieces, "")  # from here on it is known how many tokens the prompt has
    start: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(text),
    }
    yield {"type": "message_start", "message": {**_head(text), **start}}
    yield {"type": "content_block_start", "index": 0, "content_block": _block(text)}
    content = ""
    for piece in itertools.chain([first], pieces):
        content += piece
        delta = {"type": "text_delta", "text": piece}
        if text.tool:
            delta = {"type": "input_json_delta", "partial_json": piece}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": _end(text, content), "usage": _usage(text)}
    yield {"type": "message_stop"}


def _head(text: Written) -> dict[str, Any]:
    about = {"type": "message", "role": "assistant", "model": text.model.name}
    return {"id": f"msg_{secrets.token_hex(12)}", **about}


def _block(text: Written) -> dict[str, Any]:
    """The only block of content, before anything is in it."""
    if text.tool is None:
        return {"type": "text", "text": ""}
    id_ = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": id_, "name": text.tool.name, "input": {}}


def _input(content: str) -> Any:
    """The arguments of a function; None if they were cut."""
    with suppress(json.JSONDecodeError):
        return json.loads(content)
    return None


def _end(text: Written, content: str) -> dict[str, Any]:
    reason = "max_tokens" if text.finish == "length" else "end_turn"
    if text.tool:
        reason = "max_tokens" if _input(content) is None else "tool_use"
    elif text.stop:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": text.stop}


def _usage(text: Written) -> dict[str, int]:
    usage = text.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }
