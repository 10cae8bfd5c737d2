"""OpenAI's responses, as its own client sees them."""

from __future__ import annotations

from typing import Any

import pytest

from good_bodies import CHAT
from needed import needed
from pyh2o.writing.generation import Generation

openai = needed("openai")
loopback = needed("loopback", name="the server's packages")

ASKED = "once upon a time"
MESSAGES = [{"role": "user", "content": ASKED}]
DRAWING: dict[str, Any] = {"max_output_tokens": 20, "temperature": 0.0}
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
