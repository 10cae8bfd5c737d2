"""Completions and chats: the same requests to the parent, and with a long text to a small cache."""

from __future__ import annotations

from typing import Any

import llama_cpp
import pytest

from drop_in_cases import (
    FLAG_SCHEMA,
    LONG_MESSAGES,
    MESSAGES,
    assert_evicted,
    assert_follows_schema,
)
from pyh2o import Llama
from same_results import as_llama_cpp_names, assert_equal
from tiny_tokens import ONLY_ASCII

FUNCTION: Any = {"name": "set_flag", "parameters": FLAG_SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
TOOL_CHOICE: Any = {"type": "function", "function": {"name": "set_flag"}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["a", "b"]},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "tools to choose from": {"tools": [TOOL], "tool_choice": "auto"},
}
# llama_cpp makes other grammars of schemas.
HELD: dict[str, dict[str, Any]] = {
    "JSON": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "JSON of a schema": {
        "response_format": {"type": "json_object", "schema": FLAG_SCHEMA},
        "max_tokens": 300,
    },
    "tool": {"tools": [TOOL], "tool_choice": TOOL_CHOICE, "max_tokens": 300},
    "function": {
        "functions": [FUNCTION],
        "function_call": {"name": "set_flag"},
        "max_tokens": 300,
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("case", CHATS)
def test_chats_equal_the_parent_s(
    parent: llama_cpp.Llama, roomy: Llama, case: str, stream: bool
) -> None:
    expected, actual = (chat(llm, MESSAGES, case, stream) for llm in (parent, roomy))
    assert_equal(expected, as_llama_cpp_names(actual))


@pytest.mark.parametrize("case", ["plain", *HELD])
def test_chats_longer_than_the_cache(small: Llama, case: str) -> None:
    result = chat(small, LONG_MESSAGES, case)
    assert_evicted(small)
    assert result["usage"]["prompt_tokens"] > small.kv.capacity
    assert_usage(result["usage"], result["usage"]["prompt_tokens"], most=300)
    message = result["choices"][0]["message"]
    assert_equal(result, chat(small, LONG_MESSAGES, case))

    chunks = chat(small, LONG_MESSAGES, case, stream=True)
    if case in ("tool", "function"):
        call = message["tool_calls"][0]["function"]
        assert call["name"] == "set_flag"
        assert_follows_schema(call["arguments"])
        streamed = [
            call["function"]["arguments"]
            for chunk in chunks
            for call in chunk["choices"][0]["delta"].get("tool_calls") or []
        ]
        assert "".join(streamed) == call["arguments"]
    else:
        contents = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(contents) == message["content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == result["choices"][0]["finish_reason"]
    if case == "JSON of a schema":
        assert_follows_schema(message["content"])


def chat(llm: llama_cpp.Llama, messages: Any, case: str, stream: bool = False) -> Any:
    """A chat completion from scratch; the chunks of a stream as a list."""
    llm.reset()
    arguments = {"max_tokens": 40, "seed": 12, "logit_bias": ONLY_ASCII, **(CHATS | HELD)[case]}
    result = llm.create_chat_completion(messages, stream=stream, **arguments)
    return list(result) if stream else result


def assert_usage(usage: dict[str, int], n_prompt: int, most: int) -> None:
    assert usage["prompt_tokens"] == n_prompt
    assert 0 < usage["completion_tokens"] <= most
    assert usage["total_tokens"] == n_prompt + usage["completion_tokens"]
