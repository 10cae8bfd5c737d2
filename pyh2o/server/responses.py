"""OpenAI's responses, which are chat completions in other words; none is kept here."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from .bodies import ChatBody, Strict
from .dialect import Dialect, named_event
from .refusals import wrong_field
from .requests import CheckedRoute
from .written import Written, body_of, written

# What needs responses that are kept.
KEPT = ("previous_response_id", "conversation", "background", "prompt")
NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
TEXT_PARTS = ("input_text", "output_text", "text")


class _Route(CheckedRoute):
    dialect = Dialect(line=named_event)


responses_routes = APIRouter(route_class=_Route)


class ResponsesBody(Strict):
    """The body of /v1/responses; what chats have, too, is checked there."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] = Field({})
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool = False
    prompt: Any = None

    def chat(self) -> ChatBody:
        """The same as a chat.

        Raises:
            RefusedError: something is wrong with it.
        """
        for name in KEPT:
            if getattr(self, name):
                raise wrong_field(name, "no responses are kept here: send all of the text as input")
        said = self.input
        if isinstance(said, str):
            said = [{"role": "user", "content": said}]
        fields = {
            "messages": [each for n, item in enumerate(said) for each in _said(item, n)],
            "max_tokens": self.max_output_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(tool, n) for n, tool in enumerate(self.tools)],
            "tool_choice": _choice(self.tool_choice),
            "response_format": _format(self.text.get("format")),
        }
        if self.instructions:
            system = {"role": "system", "content": self.instructions}
            fields["messages"] = [system, *fields["messages"]]
        return body_of(ChatBody, fields, NAMES)


def _said(item: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """An item of the input as a message, or none."""
    where = f"input[{number}]"
    match item:
        case {"type": "reasoning"}:
            pass
        case {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}:
            call = {
                "id": id_,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(id_), "output": output}:
            yield {"role": "tool", "tool_call_id": id_, "content": _content(output, where)}
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            yield {"role": role, "content": _content(content, where)}
        case _:
            raise wrong_field(where, "give messages, function calls and their outputs: no others")


def _content(content: Any, where: str) -> Any:
    """A content as chats have it: a text, or parts."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": kind, "text": str(text)} if kind in TEXT_PARTS:
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url)}:
                parts.append({"type": "image_url", "image_url": url})
            case {"type": "input_audio"}:
                parts.append(part)
            case _:
                raise wrong_field(where, "give parts of text, image_url or audio: no others")
    return parts


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise wrong_field(f"tools[{number}].type", "give functions: no other tools are here")
    return {"type": "function", "function": tool}


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
    return choice


def _format(given: Any) -> Any:
    match given:
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    return given


# ---------------------------------------------------------------------------------------------
# The response
# ---------------------------------------------------------------------------------------------


@responses_routes.post("/v1/responses")
async def _respond(request: Request, body: ResponsesBody) -> Response:
    def whole(text: Written) -> Any:
        return _Made(text, body).whole()

    def events(text: Written) -> Iterator[Any]:
        for number, event in enumerate(_Made(text, body).events()):
            yield {**event, "sequence_number": number}

    return written(request, body.chat(), body.model, whole, events)


class _Made:
    """A response in the making, whose only item is a message or a call of a function."""

    def __init__(self, text: Written, body: ResponsesBody) -> None:
        self._text, self._body = text, body
        self._id, self._item_id = (f"{kind}_{secrets.token_hex(16)}" for kind in ("resp", "item"))

    def whole(self) -> dict[str, Any]:
        content = self._text.text()
        return self._response(self._item(content))

    def events(self) -> Iterator[dict[str, Any]]:
        pieces = iter(self._text)
        first = next(pieces, "")  # what is wrong with the request has been said now
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response(None)}
        tool, place = self._text.tool, {"output_index": 0}
        of_item = {**place, "item_id": self._item_id}
        added = {"type": "response.output_item.added", **place}
        yield {**added, "item": self._item("", status="in_progress")}
        kind = "response.function_call_arguments"
        if tool is None:
            kind = "response.output_text"
            of_item["content_index"] = 0
            part = {"type": "response.content_part.added", "part": _part("")}
            yield {**part, **of_item}
        content = ""
        log: dict[str, Any] = {} if tool else {"logprobs": []}
        for piece in itertools.chain([first], pieces):
            content += piece
            yield {"type": f"{kind}.delta", **of_item, "delta": piece, **log}
        if tool is None:
            yield {"type": f"{kind}.done", **of_item, "text": content, **log}
            yield {"type": "response.content_part.done", **of_item, "part": _part(content)}
        else:
            done = {"type": f"{kind}.done", **of_item, "name": tool.name}
            yield {**done, "arguments": content}
        item = self._item(content)
        yield {"type": "response.output_item.done", **place, "item": item}
        response = self._response(item)
        yield {"type": f"response.{response['status']}", "response": response}

    @property
    def _status(self) -> str:
        return "incomplete" if self._text.finish == "length" else "completed"

    def _item(self, content: str, status: Literal["", "in_progress"] = "") -> dict[str, Any]:
        about = {"id": self._item_id, "status": status or self._status}
        tool = self._text.tool
        if tool is not None:
            call = {"type": "function_call", "call_id": f"call_{self._item_id}"}
            return {**about, **call, "name": tool.name, "arguments": content}
        parts = [] if status else [_part(content)]
        return {**about, "type": "message", "role": "assistant", "content": parts}

    def _response(self, item: dict[str, Any] | None) -> dict[str, Any]:
        """The whole object; without an item it is still being made."""
        text, body = self._text, self._body
        status = "in_progress" if item is None else self._status
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(text.started),
            "status": status,
            "error": None,
            "incomplete_details": why,
            "model": text.model.name,
            "output": [] if item is None else [item],
            "usage": None if item is None else self._usage(),
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "metadata": {},
            **body.model_dump(
                include={"instructions", "max_output_tokens", "tools", "tool_choice", "text"}
            ),
            "temperature": text.body.temperature,
            "top_p": text.body.top_p,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._text.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.written,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
