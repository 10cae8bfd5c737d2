"""The C interface of chats: invalid input returns an error message and never ends the program."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chat_templates import GEMMA4, HELLO, QWEN3, TOOLS, prompt_of, template
from pyh2o._native import ffi, lib
from pyh2o.core.native_chat import NativeTemplate
from pyh2o.errors import ChatError

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT = "{{ raise_exception('only one turn') if messages | length > 1 else messages[0].content }}"


def apply(source: str, request: str) -> str:
    """Return the error of a request."""
    native = NativeTemplate(source)
    error = ffi.new("char **")
    assert lib.llama_h2o_chat_apply(native._native, request.encode(), error) == ffi.NULL
    text: bytes = ffi.string(error[0])
    lib.llama_h2o_chat_text_free(error[0])
    return text.decode()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("", "parse error"),
        ("[" * 100_000, "too deeply"),
        ("{}", "messages"),
        ('{"messages": 1}', "array"),
        ('{"messages": [{"role": "user", "content": "a"}], "tool_choice": "some"}', "some"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', "tools"),
    ],
)
def test_an_invalid_request_is_refused(request_: str, said: str) -> None:
    assert said in apply(PLAIN, request_)


@pytest.mark.parametrize("source", ["", "{% for %}", "{{", "{% if a %}"])
def test_an_invalid_template_is_refused(source: str) -> None:
    with pytest.raises(ChatError):
        NativeTemplate(source)


# Each exceeds the limits only slightly: without limits the test fails, but the machine survives.
LONG = "{% set s = 'a' * 10000 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{{ 'ab' * 3000000 }}",
        "{% set n = namespace(s='a') %}{% for i in range(22) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% set n = namespace(a=[1]) %}{% for i in range(23) %}{% set n.a = n.a + n.a %}"
        "{% endfor %}",
        LONG + "{{ s | replace('a', s) }}",
        LONG + "{{ s | replace('', s) }}",
        LONG + "{{ range(10000) | join(s) }}",
        "{{ (' a' * 500000) | split(' ') }}",
        "{{ 'a' | indent(100000000) }}",
        "{{ range(100) | tojson(indent=1000000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace() %}{% set n.a = n %}{{ n | tojson }}",
        "{% set n = namespace() %}{% set n.a = n %}{{ n | string }}",
        "{{ " + "(" * 100_000,
        "{{ " + "not " * 100_000,
        "{{ " + "- " * 100_000,
        "{{ a" + "()" * 100_000 + " }}",
        "{{ 1" + " + 1" * 100_000 + " }}",
        "{% if a %}" * 100_000,
        "{% if a %}" + "{% elif a %}" * 100_000 + "{% endif %}",
    ],
    ids=lambda source: source[:60],
)
def test_a_template_that_exceeds_time_or_memory_limits_is_refused(source: str) -> None:
    with pytest.raises(ChatError, match=r"^it takes too much time or memory$"):
        NativeTemplate(source)


def test_a_conversation_that_exceeds_time_or_memory_limits_is_refused() -> None:
    loop = "{% for i in range(20) %}{% set large = s | replace('a', s) %}{% endfor %}"
    native = NativeTemplate(LONG + "{% if messages[0].content == 'large' %}" + loop + "{% endif %}")
    with pytest.raises(ChatError, match=r"^the chat template takes too much .*: shorten the conv"):
        native.apply([{"role": "user", "content": "large"}])
    native.apply(HELLO)  # refused requests do not count


def test_a_template_can_read_many_messages() -> None:
    """The steps of this template grow with the square of their number."""
    roles = ("user", "assistant") * 75
    messages = [{"role": role, "content": "some words " * 50} for role in roles] + HELLO
    assert len(NativeTemplate(template(GEMMA4)).apply(messages).prompt) > 150 * 500


def test_an_error_raised_by_a_template_is_reported() -> None:
    with pytest.raises(ChatError, match="only one turn"):
        NativeTemplate(STRICT).apply(HELLO * 2)


@pytest.mark.parametrize(
    "params",
    [
        "",
        "{}",
        '{"format": 99, "generation_prompt": "", "parser": ""}',
        '{"format": 1, "generation_prompt": "", "parser": "{}"}',
    ],
)
def test_an_invalid_parser_is_refused(params: str) -> None:
    error = ffi.new("char **")
    assert lib.llama_h2o_chat_parser_init(params.encode(), error) == ffi.NULL
    assert ffi.string(error[0])
    lib.llama_h2o_chat_text_free(error[0])


def test_any_bytes_can_be_parsed() -> None:
    prompt = prompt_of(QWEN3)
    parser = prompt._native_parser
    for data in (b"", b"\0", b"<think>\xff\xfe", b"\xe2\x82", b'<tool_call>\n{"name": "\0'):
        error = ffi.new("char **")
        result = lib.llama_h2o_chat_parse(parser, data, len(data), error)
        assert result != ffi.NULL
        json.loads(ffi.string(result).decode(errors="replace"))
        lib.llama_h2o_chat_text_free(result)


def test_an_answer_nested_too_deeply_is_refused() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": ' + "[" * 100_000
    with pytest.raises(ChatError, match="too deeply"):
        prompt_of(QWEN3).parse(text)


def test_prompts_follow_the_template() -> None:
    """With special tokens as text and with template variables."""
    prompt = prompt_of(QWEN3, None)
    assert prompt.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.supports_thinking
    off = prompt_of(QWEN3, None, enable_thinking=False)
    assert off.prompt == prompt.prompt + "<think>\n\n</think>\n\n"
    spoken: list[dict[str, Any]] = [*HELLO, {"role": "assistant", "content": "", "tool_calls": []}]
    spoken[1]["tool_calls"] = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": 1}'}}
    ]
    spoken.append({"role": "tool", "tool_call_id": "a", "content": "rain"})
    written = NativeTemplate(template(QWEN3)).apply(spoken, tools=TOOLS).prompt
    assert '{"name": "weather", "arguments": {"city": 1}}' in written
    assert "<tool_response>\nrain\n</tool_response>" in written


def test_tools_produce_a_grammar() -> None:
    auto, required = prompt_of(QWEN3), prompt_of(QWEN3, tool_choice="required")
    assert (auto.grammar_lazy, required.grammar_lazy) == (True, False)
    assert auto.triggers
    assert "weather_week" in required.grammar
    assert not prompt_of(QWEN3, tool_choice="none").grammar
