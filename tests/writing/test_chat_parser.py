"""Answers in the marks of many families, told apart while they come, whatever the pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from chat_templates import GEMMA4, GPT_OSS, LLAMA31, QWEN3, QWEN25, R1, TOOLS, prompt_of
from pyh2o.core.native_chat import ChatPrompt
from pyh2o.writing.chat_parser import ChatParser
from pyh2o.writing.events import Content, Reasoning, ToolCall

WEEK = '{"city": "São \\"Paulo\\"", "days": 3}'
ROME = '{"city": "Rome"}'
HERMES = f'<tool_call>\n{{"name": "weather_week", "arguments": {WEEK}}}\n</tool_call>'
R1_CALL = (
    f"<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n{ROME}\n```"
    "<|tool_call_end|><|tool_calls_end|>"
)
R1_CALL = R1_CALL.replace("|", "\uff5c").replace("_", "\u2581")
TAGGED = (
    "<tool_call>\n<function=weather_week>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ANALYSIS = "<|channel|>analysis<|message|>Hm, rain?<|end|><|start|>assistant"


@dataclass(frozen=True)
class Case:
    """An answer as a model writes it, and what is in it."""

    template: str
    text: str
    thought: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    has_tools: bool = True


CASES = [
    Case(
        QWEN3,
        f"<think>\nIs a < b?\n</think>\n\nI look.\n{HERMES}\n{HERMES}",
        "Is a < b?\n",
        "I look.",
        (("weather_week", WEEK),) * 2,
    ),
    Case(
        QWEN3,
        '<think>\nHm.\n</think>\n\nSo {"x": 1} <think> and </think>.',
        "Hm.\n",
        'So {"x": 1} <think> and </think>.',
        has_tools=False,
    ),
    Case(QWEN3, "No thoughts.", content="No thoughts."),
    Case(QWEN3, "<think>\n\n</think>\n\nNo.", content="No."),
    Case(QWEN3, "<think>\ncut off", "cut off"),
    Case(QWEN3, "<thi", content="<thi"),
    Case(
        R1,
        f"Hm.\n</think>\n\nI look.{R1_CALL}",
        "\nHm.\n",
        "I look.",
        (("weather", ROME),),
    ),
    Case(R1, "Hm.</think>\n\n  No.\n\nYes.", "\nHm.", "  No.\n\nYes.", has_tools=False),
    Case(R1, "</think>\r\n\nNo.", content="No.", has_tools=False),
    Case(R1, f"Hm.</think>\n\n{R1_CALL}", "\nHm.", calls=(("weather", ROME),)),
    Case(QWEN25, "\n\nNo thoughts.", content="\n\nNo thoughts.", has_tools=False),
    Case(
        "llama-cpp-deepseek-r1",
        "Hm.\n</think>Yes.",
        "\nHm.\n",
        "Yes.",
        has_tools=False,
    ),
    Case(
        "Qwen3.5-4B",
        f"Hm.\n</think>\n\nI look.\n{TAGGED}",
        "Hm.\n",
        "I look.",
        (("weather_week", '{"city":"Rome","days":3}'),),
    ),
    Case(
        GPT_OSS,
        f"{ANALYSIS}<|channel|>final<|message|>It rains.",
        "Hm, rain?",
        "It rains.",
    ),
    Case(
        GPT_OSS,
        f"{ANALYSIS}<|channel|>commentary to=functions.weather_week <|constrain|>json<|message|>"
        f"{WEEK}",
        "Hm, rain?",
        calls=(("weather_week", WEEK),),
    ),
    Case(
        GEMMA4,
        '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:weather_week{city:<|"|>Rome'
        '<|"|>,days:3}<tool_call|>',
        "Hm.\n",
        "I look.",
        (("weather_week", '{"city":"Rome","days":3}'),),
    ),
    Case(
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        f"I look.\n{HERMES}",
        content="I look.",
        calls=(("weather_week", WEEK),),
    ),
    Case(QWEN25, HERMES, calls=(("weather_week", WEEK),)),
    Case("Qwen3-Coder", TAGGED, calls=(("weather_week", '{"city":"Rome","days":3}'),)),
    Case(
        LLAMA31,
        f'{{"name": "weather_week", "parameters": {WEEK}}}',
        calls=(("weather_week", WEEK),),
    ),
    Case(
        "mistralai-Mistral-Nemo-Instruct-2407",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ROME}, "id": "123456789"}}]',
        calls=(("weather", ROME),),
    ),
    Case(
        "Mistral-Small-3.2-24B-Instruct-2506",
        f"[TOOL_CALLS]weather_week[CALL_ID]123456789[ARGS]{WEEK}",
        calls=(("weather_week", WEEK),),
    ),
]

# What does not fit the template is no call, and is not lost.
MISFITS = [
    Case(QWEN25, f"{HERMES}\nAnd more.", content="And more.", calls=(("weather_week", WEEK),)),
    Case(QWEN25, "Say <tool_call>\nno</tool_call>.", content="Say <tool_call>\nno</tool_call>."),
    Case(QWEN25, "if a <", content="if a <"),
    Case(QWEN25, "<", content="<"),
    Case(LLAMA31, "In C: int f() { return 0; }", content="In C: int f() { return 0; }"),
    Case(
        QWEN3,
        "<think>\nHm.\n</think>\n\nSo <tool_call>\nno",
        "Hm.\n",
        "So <tool_call>\nno",
    ),
]


def prompt(case: Case) -> ChatPrompt:
    return prompt_of(case.template, TOOLS if case.has_tools else None)


def read(prompt: ChatPrompt, text: str, size: int, tools: Any = ()) -> ChatParser:
    """Read an answer in pieces; what is passed on is what the parser says of the whole."""
    parser = ChatParser(prompt, tools)
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.end()
    for kind, whole in ((Reasoning, parser.reasoning), (Content, parser.content)):
        assert "".join(part.text for part in parts if isinstance(part, kind)) == whole
    for index, call in enumerate(parser.calls):
        ours = [part for part in parts if isinstance(part, ToolCall) and part.index == index]
        assert (ours[0].name, ours[0].id) == (call.name, call.id)
        assert "".join(part.arguments for part in ours) == call.arguments
    return parser


@pytest.mark.parametrize(
    "case", CASES + MISFITS, ids=lambda case: f"{case.template}-{case.text[:9]}"
)
def test_an_answer_is_told_apart_in_pieces_of_any_length(case: Case) -> None:
    prompt_ = prompt(case)
    for size in range(1, len(case.text) + 1):
        parser = read(prompt_, case.text, size)
        assert parser.reasoning == case.thought, size
        assert parser.content == case.content, size
        assert [(call.name, call.arguments) for call in parser.calls] == [*case.calls], size


def test_calls_without_an_id_get_one() -> None:
    parser = read(prompt_of(QWEN25), f"{HERMES}\n{HERMES}", 5)
    one, other = parser.calls
    assert one.id.isalnum()
    assert one.id != other.id
    mistral = CASES[-2]
    assert read(prompt(mistral), mistral.text, 5).calls[0].id == "123456789"


def test_an_answer_that_is_cut_off_keeps_what_was_written_of_a_call() -> None:
    parser = read(prompt_of(QWEN25), HERMES[:60], 7)
    (call,) = parser.calls
    assert call.name == "weather_week"
    assert call.arguments.startswith('{"city')


def test_brackets_without_end_are_not_lost() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": ' + "[" * 50_000
    parser = read(prompt_of(QWEN25), text, 10_000)
    assert text.endswith(parser.calls[0].arguments + parser.content)
    assert len(parser.content) > 49_000


@pytest.mark.parametrize(
    "text",
    [
        "<think>\n" + "So a < b. " * 2000 + "\n</think>\n\n" + "And {c} <b>. " * 2000,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "' + "Rome " * 4000 + '"}}\n',
    ],
)
def test_the_work_grows_with_the_length(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters parsed for each that is written: not their number."""
    parsed: list[int] = []
    parse = ChatPrompt.parse

    def counted(self: ChatPrompt, text: str) -> Any:
        parsed.append(len(text))
        return parse(self, text)

    monkeypatch.setattr(ChatPrompt, "parse", counted)
    prompt_ = prompt_of(QWEN3)
    for length in (len(text) // 4, len(text)):
        parsed.clear()
        parser = read(prompt_, text[:length], 4)
        assert sum(parsed) < 150 * length
        assert parser.reasoning or parser.calls


FENCED = f'```json\n{{"name": "weather", "arguments": {ROME}}}\n```'


@pytest.mark.parametrize(
    ("text", "content", "n_calls"),
    [
        (FENCED, "", 1),
        (f"I look:\n\n{FENCED}\n", "I look:", 1),
        (f"{FENCED}\n{FENCED}\n{HERMES}", "", 3),
        (FENCED[:-4], "", 1),  # it ended before the block did
        (FENCED[:-9], FENCED[:-9], 0),
        (FENCED.replace("weather", "whether"), FENCED.replace("weather", "whether"), 0),
        ('```json\n{"a": 1}\n```\nSo.', '```json\n{"a": 1}\n```\nSo.', 0),
        (f"as in `{FENCED}`", f"as in `{FENCED}`", 0),
        ("```python\nprint({})\n```", "```python\nprint({})\n```", 0),
    ],
)
def test_a_call_in_a_fenced_block_is_one(text: str, content: str, n_calls: int) -> None:
    prompt_ = prompt_of(QWEN25)
    for size in range(1, len(text) + 1):
        parser = read(prompt_, text, size, ["weather", "weather_week"])
        assert (parser.content, len(parser.calls)) == (content, n_calls), size
        assert all(call.name.startswith("weather") for call in parser.calls)
    assert not read(prompt_, FENCED, 3).calls
