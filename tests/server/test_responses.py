"""OpenAI's responses, as its own client sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from good_bodies import CHAT, FLAG_SCHEMA
from needed import needed
from pyh2o.engine import Engine
from pyh2o.writing.generation import Generation

openai = needed("openai")
loopback = needed("loopback", name="the server's packages")

ASKED = "once upon a time"
MESSAGES = [{"role": "user", "content": ASKED}]
DRAWING: dict[str, Any] = {"max_output_tokens": 20, "temperature": 0.0}
TOOL = {"type": "function", "name": "set_flag", "parameters": FLAG_SCHEMA, "strict": True}
FORCED: dict[str, Any] = {
    "tools": [TOOL], "tool_choice": {"type": "function", "name": "set_flag"},
    "max_output_tokens": 90,
}  # fmt: skip
# Of each response its own, or what an earlier one with the same prompt changes.
OWN = {"id", "call_id", "created_at", "usage", "item_id"}


@pytest.fixture
def client(server: Any) -> Any:
    return loopback.openai_client(server.address)


def respond(client: Any, **arguments: Any) -> Any:
    """The response, after a stream that came to the same."""
    given = {"model": "tiny", "input": ASKED, **DRAWING, **arguments}
    plain = client.responses.create(**given)
    with client.responses.stream(**given) as stream:
        events = list(stream)
    streamed = events[-1].response  # the client gives out completed ones only
    assert [event.sequence_number for event in events] == [*range(len(events))]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == plain.output_text == streamed.output_text
    assert told(streamed) == told(plain)
    used, of_stream = plain.usage, streamed.usage
    assert (used.input_tokens, used.output_tokens) == (
        of_stream.input_tokens, of_stream.output_tokens
    )  # fmt: skip
    return streamed


def told(response: Any) -> Any:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in OWN and v is not None}
        return [without(each) for each in value] if isinstance(value, list) else value

    data = response.model_dump(exclude_none=True)
    for item in data["output"]:
        for part in (item, *(item.get("content") or ())):
            part.pop("parsed_arguments", None)
            part.pop("parsed", None)
    return without(data)


def test_a_response_is_the_chat_s(client: Any, server: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    body = {"messages": [system, *MESSAGES], "max_tokens": 20, "temperature": 0}
    chat = server.post(CHAT, body).json
    response = respond(client, instructions="Be brief.")
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens"
    )  # fmt: skip
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == 20
    assert response.usage.input_tokens_details.cached_tokens > 0


def test_an_answer_follows_a_schema(client: Any) -> None:
    wanted = {"format": {"type": "json_schema", "name": "flag", "schema": FLAG_SCHEMA}}
    response = respond(client, text=wanted, max_output_tokens=90)
    assert isinstance(json.loads(response.output_text)["flag"], bool)
    assert (response.status, response.incomplete_details) == ("completed", None)


def test_a_function_is_called(client: Any) -> None:
    response = respond(client, **FORCED)
    [call] = response.output
    assert (call.type, call.name, response.status) == ("function_call", "set_flag", "completed")
    assert isinstance(json.loads(call.arguments)["flag"], bool)
    parts = client.responses.create(model="tiny", input=ASKED, stream=True, **FORCED)
    kinds = [event.type for event in parts]
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip


def test_what_was_said_is_not_read_again(client: Any, engine: Engine) -> None:
    drawing = {**DRAWING, "max_output_tokens": 4, "model": "tiny"}
    talk: list[Any] = [{"role": "user", "content": "once upon a time there was"}]
    first = client.responses.create(input=talk, **drawing)
    talk += [*first.output, {"role": "user", "content": [{"type": "input_text", "text": "why?"}]}]
    second = client.responses.create(input=talk, **drawing)
    assert 20 < second.usage.input_tokens_details.cached_tokens < second.usage.input_tokens


def test_calls_and_their_outputs_are_messages(client: Any, server: Any) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    reasoning: Any = {"type": "reasoning", "id": "r1", "summary": []}
    response = client.responses.create(
        model="tiny", input=[*MESSAGES, reasoning, call, output], **DRAWING
    )
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    chat = server.post(CHAT, {"messages": messages, "max_tokens": 20, "temperature": 0}).json
    assert response.output_text == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"max_output_tokens": -3}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_what_is_wrong_is_named(server: Any, fields: Any, param: str, stream: bool) -> None:
    error = server.refused("/v1/responses", {"input": "a", "stream": stream, **fields})
    assert param in error["message"]


def test_an_error_amid_a_stream(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_generation: Generation) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr(Generation, "end", fail)
    with pytest.raises(openai.APIError, match="no more"):
        list(client.responses.create(model="tiny", input=ASKED, stream=True, **DRAWING))
