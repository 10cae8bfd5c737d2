"""Anthropic's messages, as its own client sees them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from good_bodies import CHAT, FLAG_SCHEMA
from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from pyh2o.writing.generation import Generation
from tiny_gguf import write_tiny_gguf

anthropic = needed("anthropic")
loopback = needed("loopback", name="the server's packages")

MESSAGES: Any = [{"role": "user", "content": "once upon a time"}]
FIELDS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
# The client does not know the temperature any more.
DRAWING: dict[str, Any] = {"max_tokens": 20, "extra_body": {"temperature": 0.0}}
TOOL = {"name": "set_flag", "description": "Sets it.", "input_schema": FLAG_SCHEMA}
FORCED: dict[str, Any] = {
    "tools": [TOOL], "tool_choice": {"type": "tool", "name": "set_flag"}, "max_tokens": 90
}  # fmt: skip


def client_of(server: Any, api_key: str = "any") -> Any:
    url = f"http://127.0.0.1:{server.port}"
    settings = {"max_retries": 0, "timeout": loopback.PATIENCE}
    return anthropic.Anthropic(base_url=url, api_key=api_key, **settings)


@pytest.fixture
def client(server: Any) -> Any:
    return client_of(server)


def say(client: Any, **arguments: Any) -> Any:
    """The message, after a stream that came to the same."""
    given = {"model": "tiny", "messages": MESSAGES, **DRAWING, **arguments}
    plain = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == "".join(block.text for block in plain.content if block.type == "text")
    for message in (plain, streamed):
        message.id = ""
        for block in message.content:
            if block.type == "tool_use":
                block.id = ""
    without = {"usage"}
    assert streamed.model_dump(exclude=without, exclude_none=True) == plain.model_dump(
        exclude=without, exclude_none=True
    )
    used, of_stream = plain.usage, streamed.usage
    assert used.output_tokens == of_stream.output_tokens
    assert used.input_tokens + used.cache_read_input_tokens == (
        of_stream.input_tokens + of_stream.cache_read_input_tokens
    )
    return streamed


def test_a_message_is_openai_s(client: Any, server: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    told = server.post(CHAT, {"messages": [system, *MESSAGES], **FIELDS}).json
    message = say(client, system="Be brief.")
    [block] = message.content
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert block.text == told["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == told["usage"]["prompt_tokens"]
    assert usage.output_tokens == 20


def test_the_first_event_tells_the_prompt(client: Any) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60}
    first, *others = client.messages.create(**given, stream=True)
    assert first.type == "message_start"
    usage, last = first.message.usage, others[-2].usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 16
    assert last.cache_read_input_tokens == usage.cache_read_input_tokens
    kinds = [event.type for event in others]
    n_pieces = len(kinds) - 4
    assert n_pieces > 5
    assert kinds == [
        "content_block_start", *n_pieces * ["content_block_delta"],
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_why_a_message_ended(client: Any) -> None:
    text = say(client, max_tokens=60).content[0].text
    found = next(n for n in range(3, len(text)) if text[n].isascii() and text[n].isprintable())
    stopped = say(client, max_tokens=60, stop_sequences=["never", text[found]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[found])
    schema = {"type": "json_schema", "schema": FLAG_SCHEMA}
    ended = say(client, max_tokens=90, output_config={"format": schema})
    assert isinstance(json.loads(ended.content[0].text)["flag"], bool)
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


def test_a_tool_is_used(client: Any) -> None:
    message = say(client, **FORCED)
    [block] = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "set_flag", "tool_use")
    assert isinstance(block.input["flag"], bool)
    any_tool = say(client, **{**FORCED, "tool_choice": {"type": "any"}})
    assert any_tool.content[0].name == "set_flag"
    cut = client.messages.create(model="tiny", messages=MESSAGES, **{**FORCED, "max_tokens": 2})
    assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {})


def test_a_model_that_does_not_think_keeps_any_budget(
    client: Any, tmp_path: Path, engine: Engine
) -> None:
    with ExitStack() as stack:
        bare = write_tiny_gguf(tmp_path / "bare.gguf", seed=5, chat_template=None)
        model = stack.enter_context(tiny_engine(bare, texts=1, n_ctx=256))
        without = client_of(stack.enter_context(loopback.LoopbackServer(model)))
        for asked in (client, without):  # with a template, and without
            for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}):
                message = asked.messages.create(
                    model="tiny", messages=MESSAGES, max_tokens=3, thinking=thinking
                )
                assert message.usage.output_tokens == 3


def test_an_answer_that_is_begun_goes_on(client: Any) -> None:
    counted = []
    for begun in ("", "so", "so it is so"):
        talk = [*MESSAGES, {"role": "assistant", "content": begun}][: 2 if begun else 1]
        counted.append(client.messages.count_tokens(model="tiny", messages=talk).input_tokens)
        message = client.messages.create(model="tiny", messages=talk, max_tokens=4)
        assert not message.content[0].text.startswith("so")
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted[-1]
    assert counted == sorted(set(counted))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
        ({"temperature": -1.0}, "temperature"),
        ({"tools": [{"name": "web_search"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(server: Any, fields: Any, named: str, stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": stream, **fields}
    reply = server.post("/v1/messages", body)
    assert (reply.status, reply.json["type"]) == (400, "error")
    assert reply.json["error"].keys() == {"type", "message"}
    assert named in reply.json["error"]["message"]


def test_errors_are_anthropic_s(
    client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="tiny", messages=MESSAGES, max_tokens=-3)

    def fail(_generation: Generation) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr(Generation, "end", fail)
    with pytest.raises(anthropic.APIStatusError, match="no more"):
        list(client.messages.create(model="tiny", messages=MESSAGES, stream=True, **DRAWING))
    with loopback.LoopbackServer(engine, api_key="secret") as server:
        with pytest.raises(anthropic.AuthenticationError):
            client_of(server).messages.count_tokens(model="tiny", messages=MESSAGES)
        assert client_of(server, "secret").messages.count_tokens(model="tiny", messages=MESSAGES)
