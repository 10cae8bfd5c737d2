"""OpenAI's responses API over chat completions; responses are not stored."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from .bodies import ChatBody, Strict
from .custom_tools import input_of
from .dialect import Dialect, named_event
from .refusals import wrong_field
from .requests import routes_of
from .written import Block, Written, body_of, written

# Fields that need stored responses.
KEPT = ("previous_response_id", "conversation", "background", "prompt")
NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
# Names in the events of each kind of block.
KINDS = {
    "content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments",
}  # fmt: skip
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


responses_routes = routes_of(Dialect(line=named_event))


class ResponsesBody(Strict):
    """The body of /v1/responses; `ChatBody` validates the values."""

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
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] = Field({})
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool = False
    prompt: Any = None

    def chat(self) -> ChatBody:
        for name in KEPT:
            if getattr(self, name):
                raise wrong_field(
                    name, "responses are not stored here: send the whole history as input"
                )
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        fields = {
            "messages": _merged(
                each for n, item in enumerate(items) for each in _converted(item, n)
            ),
            "max_tokens": self.max_output_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(tool) for tool in self.tools],
            "tool_choice": _tool(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.get("effort"),
            "response_format": _format(self.text.get("format")),
        }
        if self.instructions:
            system = {"role": "system", "content": self.instructions}
            fields["messages"] = [system, *fields["messages"]]
        return body_of(ChatBody, fields, NAMES)


def _converted(item: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    where = f"input[{number}]"
    match item:
        case {"type": "reasoning"}:
            reasoning = _content(item.get("content") or "", where)
            yield {"role": "assistant", "content": "", "reasoning_content": reasoning}
        case {"type": "function_call", "call_id": str(id_), "name": str(name)}:
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": id_, "type": "function", "function": function}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        case {
            "type": "custom_tool_call", "call_id": str(id_), "name": str(name), "input": str(text)
        }:  # fmt: skip
            call = {"id": id_, "type": "custom", "custom": {"name": name, "input": text}}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        case {
            "type": "function_call_output" | "custom_tool_call_output",
            "call_id": str(id_),
            "output": output,
        }:
            yield {"role": "tool", "tool_call_id": id_, "content": _content(output, where)}
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            yield {"role": role, "content": _content(content, where)}
        case _:
            raise wrong_field(
                where, "unsupported item: use messages, function calls and their outputs"
            )


def _merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge reasoning, text and calls of one answer, which are separate items, into one message."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else {}
        is_more = message["role"] == last.get("role") == "assistant"
        if is_more and not (last["content"] and message["content"]):
            for name, value in message.items():
                last[name] = value if name == "role" else (last.get(name) or type(value)()) + value
        else:
            merged.append(dict(message))
    return merged


def _content(content: Any, where: str) -> Any:
    """Return content as chats have it: a string, or parts with pictures or sound."""
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
                raise wrong_field(where, "unsupported part: use text, image_url or audio")
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _tool(tool: Any) -> Any:
    """Return a tool or a tool choice as chats have it."""
    match tool:
        case {"type": "function" | "custom" as kind}:
            return {"type": kind, kind: tool}
    return tool


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
        return _Response(text, body).whole()

    def events(text: Written) -> Iterator[Any]:
        for number, event in enumerate(_Response(text, body).events()):
            yield {**event, "sequence_number": number}

    return written(request, body.chat(), body.model, whole, events)


class _Response:
    """A response; its items are the blocks of the answer."""

    def __init__(self, text: Written, body: ResponsesBody) -> None:
        self._text, self._body = text, body
        self._id = f"resp_{secrets.token_hex(16)}"

    def whole(self) -> dict[str, Any]:
        self._text.all_blocks()
        return self._response(is_done=True)

    def events(self) -> Iterator[dict[str, Any]]:
        parts = self._text.parts()
        first = next(parts)  # raises the errors of the request before the first event
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response(is_done=False)}
        for block, piece in itertools.chain([first], parts):
            number = len(self._text.blocks) - 1
            if piece == "":
                yield from self._begin(block, number)
            elif piece is None:
                yield from self._end(block, number)
            elif not self._is_custom(block):
                yield {**self._of(block, number, "delta"), "delta": piece}
        response = self._response(is_done=True)
        yield {"type": f"response.{response['status']}", "response": response}

    def _begin(self, block: Block, number: int) -> Iterator[dict[str, Any]]:
        item = self._item(block, number, is_done=False)
        yield {"type": "response.output_item.added", "output_index": number, "item": item}
        if block.kind == "content":
            position = self._position(block, number)
            yield {"type": "response.content_part.added", **position, "part": _part(block, "")}

    def _end(self, block: Block, number: int) -> Iterator[dict[str, Any]]:
        done = self._of(block, number, "done")
        if self._is_custom(block):  # the input is known at the end only
            text = input_of(block.text)
            yield {**self._of(block, number, "delta"), "delta": text}
            yield {**done, "input": text}
        elif block.kind == "call":
            yield {**done, "name": block.name, "arguments": block.text}
        else:
            yield {**done, "text": block.text}
        if block.kind == "content":
            part = _part(block, block.text)
            position = self._position(block, number)
            yield {"type": "response.content_part.done", **position, "part": part}
        item = self._item(block, number, is_done=True)
        yield {"type": "response.output_item.done", "output_index": number, "item": item}

    def _is_custom(self, block: Block) -> bool:
        body = self._text.body
        return isinstance(body, ChatBody) and block.name in body.custom_tools

    def _of(self, block: Block, number: int, what: str) -> dict[str, Any]:
        log: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        kind = "custom_tool_call_input" if self._is_custom(block) else KINDS[block.kind]
        about = {"type": f"response.{kind}.{what}"}
        return {**about, **self._position(block, number), **log}

    def _position(self, block: Block, number: int) -> dict[str, Any]:
        position = {"output_index": number, "item_id": self._item_id(number)}
        return position if block.kind == "call" else {**position, "content_index": 0}

    def _item_id(self, number: int) -> str:
        return f"item_{self._id}_{number}"

    @property
    def _status(self) -> str:
        return "incomplete" if self._text.finish == "length" else "completed"

    def _item(self, block: Block, number: int, *, is_done: bool) -> dict[str, Any]:
        status = self._status if is_done else "in_progress"
        about = {"id": self._item_id(number), "status": status}
        if block.kind == "call":
            call = {**about, "call_id": block.id, "name": block.name}
            if self._is_custom(block):
                return {**call, "type": "custom_tool_call", "input": input_of(block.text)}
            return {**call, "type": "function_call", "arguments": block.text}
        parts = [_part(block, block.text)] if is_done else []
        if block.kind == "reasoning":
            return {**about, "type": "reasoning", "summary": [], "content": parts}
        return {**about, "type": "message", "role": "assistant", "content": parts}

    def _response(self, *, is_done: bool) -> dict[str, Any]:
        """Return the response object; it has output only when `is_done`."""
        text, body = self._text, self._body
        status = self._status if is_done else "in_progress"
        items = enumerate(text.blocks if is_done else ())
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(text.started),
            "status": status,
            "error": None,
            "incomplete_details": why,
            "model": text.model.name,
            "output": [self._item(block, number, is_done=True) for number, block in items],
            "usage": self._usage() if is_done else None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
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
            "output_tokens": usage.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.sampled,
        }


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
