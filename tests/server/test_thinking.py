"""Thoughts and calls of tools in OpenAI's routes and the dialects, each by its own package."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_templates import QWEN3, TOOLS
from good_bodies import CHAT
from many_texts import tiny_engine
from needed import needed
from pyh2o import Sampling, Thinking
from pyh2o.limits import Limits
from pyh2o.server.new_sessions import new_session
from pyh2o.server.served_model import ServedModel
from pyh2o.server.session_bodies import NewSessionBody
from spoken import let_say, write_speaker

openai = needed("openai")
anthropic = needed("anthropic")
ollama = needed("ollama")
loopback = needed("loopback", name="the server's packages")

ASKED: Any = [{"role": "user", "content": "Hi"}]
ROME = {"city": "Rome"}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ROME)}}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
TOOL = TOOLS[0]["function"]
ANTHROPIC_TOOLS: Any = [{"name": "weather", "input_schema": TOOL["parameters"]}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = write_speaker(tmp_path_factory.mktemp("model") / "tiny.gguf", QWEN3)
    cache = {"n_ctx": 1024, "hh": 128, "recent": 128, "slack": 64}
    with tiny_engine(path, texts=2, **cache) as engine, loopback.LoopbackServer(engine) as running:
        yield running


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> deque[str]:
    return let_say(monkeypatch)


@pytest.fixture
def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_openai_s_chats(url: str, answers: deque[str]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS}
    answers.extend([ANSWER] * 2)
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.message.reasoning_content == "Hm.\n"
    assert choice.message.content == "I look."
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ROME)
    assert choice.finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked) as stream:
        told = stream.get_final_completion().choices[0]
    assert told.message.content == "I look."
    assert json.loads(told.message.tool_calls[0].function.arguments) == ROME
    assert told.finish_reason == "tool_calls"


def test_openai_s_responses(url: str, answers: deque[str]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    tools = [{"type": "function", **TOOL, "strict": False}]
    asked: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": tools}
    answers.extend([ANSWER] * 3)
    plain = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (plain, streamed):
        thought, said, call = response.output
        assert [part.text for part in thought.content] == ["Hm.\n"]
        assert said.content[0].text == response.output_text == "I look."
        assert (call.name, json.loads(call.arguments)) == ("weather", ROME)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    items = [{"role": "user", "content": "Hi"}, *[each.model_dump() for each in plain.output]]
    again = client.responses.create(**{**asked, "input": [*items, result]})
    assert again.usage.input_tokens_details.cached_tokens > 0.8 * plain.usage.total_tokens


def test_anthropic_s_messages(url: str, answers: deque[str]) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    asked: dict[str, Any] = {
        "model": "tiny", "max_tokens": 500, "messages": ASKED, "tools": ANTHROPIC_TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    answers.extend([ANSWER] * 3)
    plain = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (plain, streamed):
        thought, said, call = message.content
        assert (thought.type, thought.thinking, said.text) == ("thinking", "Hm.\n", "I look.")
        assert (call.name, call.input, message.stop_reason) == ("weather", ROME, "tool_use")
    result = {"type": "tool_result", "tool_use_id": plain.content[2].id, "content": "20 degrees"}
    talk = [*ASKED, {"role": "assistant", "content": plain.content}]
    asked["messages"] = [*talk, {"role": "user", "content": [result]}]
    read = client.messages.create(**asked).usage
    assert read.cache_read_input_tokens > 3 * read.input_tokens
    answers.append("Yes.")
    quiet = client.messages.create(**{**asked, "thinking": {"type": "disabled"}})
    assert [block.type for block in quiet.content] == ["text"]


def test_ollama_s_chats(url: str, answers: deque[str]) -> None:
    client = ollama.Client(host=url)
    assert {"tools", "thinking"} <= set(client.show("tiny").capabilities)
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS}
    answers.extend([ANSWER] * 2)
    message = client.chat(**asked).message
    assert (message.thinking, message.content) == ("Hm.\n", "I look.")
    assert message.tool_calls[0].function.arguments == ROME
    parts = [part.message for part in client.chat(**asked, stream=True)]
    assert "".join(part.thinking or "" for part in parts) == "Hm.\n"
    assert "".join(part.content or "" for part in parts) == "I look."
    assert [call.function.name for part in parts for call in part.tool_calls or ()] == ["weather"]
    answers.append("Yes.")
    assert client.chat(model="tiny", messages=ASKED, think=False).message.content == "Yes."


GRAMMAR = {"syntax": "lark", "definition": 'start: "*** Begin"'}
PATCH = {"name": "patch", "description": "Changes files.", "format": {"type": "grammar", **GRAMMAR}}
PATCHED = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n\\"a\\""}}\n</tool_call>'
)
TEXT = '*** Begin\n"a"'


def test_custom_tools_of_responses(url: str, answers: deque[str]) -> None:
    """As Codex asks for them, with tools that only OpenAI's servers have."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    tools: Any = [
        {"type": "web_search"}, {"type": "custom", **PATCH}, {"type": "local_shell"},
        {"type": "mcp", "server_label": "a", "server_url": "https://example.com"},
        {"type": "function", **TOOL, "strict": False},
    ]  # fmt: skip
    asked: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": tools}
    answers.extend([f"I patch.\n{PATCHED}"] * 2)
    plain = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    for response in (plain, events[-1].response):
        said, call = response.output
        assert (said.content[0].text, call.type) == ("I patch.", "custom_tool_call")
        assert (call.name, call.input) == ("patch", TEXT)
    told = {event.type: event for event in events}
    assert told["response.custom_tool_call_input.delta"].delta == TEXT
    assert told["response.custom_tool_call_input.done"].input == TEXT
    assert "response.function_call_arguments.delta" not in told
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    items = [{"role": "user", "content": "Hi"}, *[each.model_dump() for each in plain.output]]
    answers.append("So be it.")
    again = client.responses.create(**{**asked, "input": [*items, output]})
    assert again.output_text == "So be it."
    assert again.usage.input_tokens_details.cached_tokens > 0.8 * plain.usage.total_tokens
    forced = {**asked, "tool_choice": {"type": "custom", "name": "patch"}}
    answers.append(PATCHED)
    assert client.responses.create(**forced).output[-1].input == TEXT


def test_custom_tools_of_chats(url: str, server: Any, answers: deque[str]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    tools: Any = [{"type": "custom", "custom": PATCH}, {"type": "web_search"}, *TOOLS]
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": tools}
    answers.extend([f"I patch.\n{CALL}\n{PATCHED}"] * 2)
    [choice] = client.chat.completions.create(**asked, parallel_tool_calls=True).choices
    weather, call = choice.message.tool_calls
    assert (weather.function.name, choice.finish_reason) == ("weather", "tool_calls")
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", TEXT)
    body = {**asked, "parallel_tool_calls": True, "stream": True}
    events = server.post(CHAT, body).events
    deltas = [e["choices"][0]["delta"].get("tool_calls", [{}])[0] for e in events]
    custom = [delta for delta in deltas if "custom" in delta]
    assert [(each["index"], each["custom"]["input"]) for each in custom] == [(1, TEXT)]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": "done"} for each in (weather, call)
    ]
    answers.append("So be it.")
    asked["messages"] = [*ASKED, choice.message.model_dump(), *results]
    assert client.chat.completions.create(**asked).choices[0].message.content == "So be it."


def test_tools_that_anthropic_s_servers_have_are_left_out(url: str, answers: deque[str]) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    theirs: Any = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": ASKED}
    answers.append(CALL)
    [call] = client.messages.create(**asked, tools=[*theirs, *ANTHROPIC_TOOLS]).content
    assert (call.name, call.input) == ("weather", ROME)
    told, alone = (
        client.messages.count_tokens(model="tiny", messages=ASKED, tools=tools).input_tokens
        for tools in ([*theirs, *ANTHROPIC_TOOLS], ANTHROPIC_TOOLS)
    )
    assert told == alone
    chosen: Any = {"type": "tool", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match="tool_choice: "):
        client.messages.create(**asked, tools=theirs, tool_choice=chosen)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(server: Any, fields: Any, param: str) -> None:
    reply = server.post(CHAT, {"messages": ASKED, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_thoughts_can_be_turned_off_and_limited(server: Any, answers: deque[str]) -> None:
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 100}
    for fields in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_budget": 0},
    ):
        answers.append("Yes.")
        message = server.post(CHAT, {**body, **fields}).json["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yes."}
    answers.append("<think>\n" + "a" * 100)
    message = server.post(CHAT, {**body, "thinking_budget_tokens": 9}).json["choices"][0]["message"]
    assert len(message["reasoning_content"]) < 20


def test_the_server_can_say_it_for_all(tmp_path: Path, answers: deque[str]) -> None:
    path = write_speaker(tmp_path / "tiny.gguf", QWEN3)
    limits = Limits(reasoning_budget=9)
    with tiny_engine(path, texts=1, n_ctx=1024, hh=128, recent=128, slack=64) as engine:
        with loopback.LoopbackServer(engine, limits=limits) as server:
            answers.append("<think>\n" + "a" * 100)
            reply = server.post(CHAT, {"messages": ASKED, "temperature": 0, "max_tokens": 60})
            assert len(reply.json["choices"][0]["message"]["reasoning_content"]) < 20
        served = ServedModel(engine, "tiny", limits)
        with engine.slot() as place:
            session = new_session(place, NewSessionBody(), Sampling(), served.thinking)
            assert session.thinking == Thinking(budget=9)
        with loopback.LoopbackServer(engine, limits=Limits(thinks=False)) as server:
            quiet = server.post(CHAT, {"messages": ASKED, "max_tokens": 1}).json["usage"]
            told = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 1}
            loud = server.post(CHAT, {"messages": ASKED, **told}).json["usage"]
    assert quiet["prompt_tokens"] > loud["prompt_tokens"]
