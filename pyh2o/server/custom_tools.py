"""Custom tools, whose input is a text: the model sees a function with one argument, `input`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from typing import Any

# Type of tools that the provider runs itself, such as web_search.
OTHER = "other"
_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def as_function(tool: Any) -> Any:
    """Return a custom tool as a function, whose description includes the grammar of the input."""
    match tool:
        case {"type": "custom", "custom": {**about}}:
            function = {name: about.get(name) for name in ("name", "description")}
        case {"type": str(kind)} if kind not in ("function", "custom"):
            return {"type": OTHER, "function": {"name": OTHER}}
        case _:
            return tool
    match about.get("format"):
        # of chats and of responses
        case {"grammar": {"definition": str(text)}} | {"definition": str(text)}:
            described = f"{about.get('description') or ''}\n\n`input` has this grammar:\n{text}"
            function["description"] = described.lstrip()
    return {"type": "custom", "function": {**function, "parameters": _PARAMETERS}}


def as_function_call(call: Any) -> Any:
    match call:
        case {"type": "custom", "custom": {"name": name, "input": text}, **about}:
            function = {"name": name, "arguments": json.dumps({"input": text})}
            return {**about, "type": "function", "function": function}
    return call


def input_of(arguments: str) -> str:
    """Return the text in the arguments of a call; truncated arguments are returned unchanged."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, TypeError, KeyError):
        return arguments
    return text if isinstance(text, str) else json.dumps(text)


def with_custom_calls(result: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    """Return the result of a chat with calls of the tools `names` as custom calls."""
    for choice in result["choices"]:
        message = choice["message"]
        if message.get("tool_calls"):
            message["tool_calls"] = [_custom_call(call, names) for call in message["tool_calls"]]
    return result


def chunks_with_custom_calls(
    chunks: Iterator[dict[str, Any]], names: Set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a chat; each call of the tools `names` is one chunk."""
    held: dict[str, Any] | None = None
    for chunk in chunks:
        choice = chunk["choices"][0] if chunk["choices"] else {"delta": {}}
        [call] = choice["delta"].get("tool_calls") or [None]
        if held is not None and call is not None and call["index"] == held["index"]:
            held["function"]["arguments"] += call["function"]["arguments"]
            continue
        if held is not None:
            delta = {"tool_calls": [_custom_call(held, names)]}
            whole = {**choice, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**chunk, "choices": [whole]}
            held = None
        if call is not None and call["function"].get("name") in names:
            held = call
        else:
            yield chunk


def _custom_call(call: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    name = call["function"]["name"]
    if name not in names:
        return call
    about = {key: value for key, value in call.items() if key != "function"}
    custom = {"name": name, "input": input_of(call["function"]["arguments"])}
    return {**about, "type": "custom", "custom": custom}
