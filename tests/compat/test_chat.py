"""Thoughts and calls of tools in chats by the templates of real models."""

from __future__ import annotations

import json
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chat_templates import GPT_OSS, HELLO, QWEN3, QWEN25, R1, TOOLS, template
from pyh2o import Llama
from pyh2o.core.model import Model
from pyh2o.errors import SettingsError
from spoken import let_say, write_speaker
from tiny_chat import write_chat_gguf
from tiny_llama import tiny_llama

CACHE: dict[str, Any] = {"n_ctx": 1024, "hh": 128, "recent": 128, "slack": 64}
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
GREEDY: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 200}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Llama]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: tiny_llama(write_speaker(folder / f"{name}.gguf", name), **CACHE)
        for name in (QWEN3, QWEN25, R1, GPT_OSS)
    }


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> deque[str]:
    return let_say(monkeypatch)


def chat(llm: Llama, answers: deque[str], text: str, **given: Any) -> Any:
    """The choice, after a stream that came to the same."""
    arguments = {"messages": HELLO, **GREEDY, **given}
    answers.extend([text] * 2)
    llm.reset()
    [choice] = llm.create_chat_completion(**arguments)["choices"]
    llm.reset()
    message: dict[str, Any] = {"role": "", "content": ""}
    finish = None
    for chunk in llm.create_chat_completion(**arguments, stream=True):
        [part] = chunk["choices"]
        finish = part["finish_reason"]
        for name, value in part["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
        for call in part["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"type": call["type"], "function": {"name": "", "arguments": ""}})
            for name, value in call["function"].items():
                calls[call["index"]]["function"][name] += value
    for call in choice["message"].get("tool_calls", ()):
        assert call.pop("id")
    assert {**choice["message"], "content": choice["message"]["content"] or ""} == message
    assert finish == choice["finish_reason"]
    return choice


def test_thoughts_are_apart(models: dict[str, Llama], answers: deque[str]) -> None:
    choice = chat(models[QWEN3], answers, "<think>\nHm.\n</think>\n\nYes.")
    assert choice["message"]["reasoning_content"] == "Hm.\n"
    assert choice["message"]["content"] == "Yes."
    assert choice["finish_reason"] == "stop"
    opened = chat(models[R1], answers, "Hm.\n</think>Yes.")
    assert opened["message"]["content"] == "Yes."
    channels = chat(
        models[GPT_OSS],
        answers,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    )
    assert channels["message"] == {
        "role": "assistant", "content": "Yes.", "reasoning_content": "Hm."
    }  # fmt: skip


@pytest.mark.parametrize("choice", [None, "auto", "required", "named"])
def test_tools_are_called(
    models: dict[str, Llama], answers: deque[str], choice: str | None
) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    wanted = named if choice == "named" else choice
    made = chat(models[QWEN3], answers, CALL, tools=TOOLS, tool_choice=wanted)
    [call] = made["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ROME}
    assert made["finish_reason"] == "tool_calls"
    assert made["message"]["content"] is None


BEGUN: dict[str, Any] = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("name", "begun", "text", "said"),
    [
        (QWEN3, {"content": "I "}, "see.", {"content": "see."}),
        (
            QWEN3, {"reasoning_content": "Hm, "}, "so.\n</think>\n\nYes.",
            {"reasoning_content": "so.\n", "content": "Yes."},
        ),
        (
            R1, {"reasoning_content": "Hm, "}, "so.\n</think>Yes.",
            {"reasoning_content": "so.\n", "content": "Yes."},
        ),
        (
            R1, {"reasoning_content": "Hm, "}, "so.\n</think>\n\nYes.",
            {"reasoning_content": "so.\n", "content": "Yes."},
        ),
        (R1, {"reasoning_content": "Hm.\n</thi"}, "nk>\n\nYes.", {"content": "Yes."}),
        (R1, {"reasoning_content": "Hm.", "content": "Y"}, "es.", {"content": "es."}),
        (R1, {"reasoning_content": "Hm.", "content": "Y"}, "\n\nes.", {"content": "\n\nes."}),
        (QWEN3, {"reasoning_content": "Hm.", "content": "Y"}, "\n\nes.", {"content": "\n\nes."}),
        (
            GPT_OSS, {"reasoning_content": "Hm, "},
            "so.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            {"reasoning_content": "so.", "content": "Yes."},
        ),
        (QWEN3, {"content": "A <tool"}, "box is there.", {"content": "box is there."}),
        (
            QWEN3, {"reasoning_content": "Hm </thi"}, "s>\n</think>\n\nYes.",
            {"reasoning_content": "s>\n", "content": "Yes."},
        ),
        (
            QWEN3, {"reasoning_content": "Hm.\n</thi"}, "nk>\n\nYes.", {"content": "Yes."},
        ),
    ],
)  # fmt: skip
def test_begun_answers_go_on(
    models: dict[str, Llama],
    answers: deque[str],
    name: str,
    begun: dict[str, Any],
    text: str,
    said: dict[str, Any],
) -> None:
    talk = [*HELLO, {**BEGUN, **begun}]
    goes_on = {"messages": talk, "continue_final_message": True}
    choice = chat(models[name], answers, text, tools=TOOLS, **goes_on)
    assert choice["message"] == {"role": "assistant", **said}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("n_begun", [0, 5, 30])
def test_calls_come_behind_begun_answers(
    models: dict[str, Llama], answers: deque[str], n_begun: int
) -> None:
    """Also where it ends amid one."""
    talk = [*HELLO, {**BEGUN, "content": f"I look.\n{CALL[:n_begun]}"}]
    goes_on = {"messages": talk, "continue_final_message": True}
    choice = chat(models[QWEN3], answers, CALL[n_begun:], tools=TOOLS, **goes_on)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ROME}
    assert not choice["message"]["content"]
    assert choice["finish_reason"] == "tool_calls"


def test_begun_thoughts_have_a_budget(models: dict[str, Llama], answers: deque[str]) -> None:
    talk = [*HELLO, {**BEGUN, "reasoning_content": "a" * 20}]
    goes_on = {"messages": talk, "continue_final_message": True, "reasoning_budget": 9}
    message = chat(models[QWEN3], answers, "a" * 100, **goes_on)["message"]
    assert 5 <= message["reasoning_content"].count("a") <= 18


def test_without_tools_a_call_is_text(models: dict[str, Llama], answers: deque[str]) -> None:
    assert chat(models[QWEN3], answers, CALL)["message"]["content"] == CALL
    none = chat(models[QWEN3], answers, CALL, tools=TOOLS, tool_choice="none")
    assert none["message"]["content"] == CALL


def test_a_call_follows_its_grammar(models: dict[str, Llama], answers: deque[str]) -> None:
    """From its mark on, and not in thoughts."""
    wrong = "<tool_call>\n[1]\n</tool_call>"
    kept = chat(models[QWEN3], answers, f"<think>\n{wrong}\n</think>\n\nYes.", tools=TOOLS)
    assert kept["message"]["reasoning_content"] == f"{wrong}\n"
    forced = chat(models[QWEN3], answers, f"So {wrong}", tools=TOOLS)
    assert wrong not in str(forced["message"])


@pytest.mark.parametrize("name", [QWEN3, QWEN25, R1])
@pytest.mark.parametrize("text", ["", "I cannot help."])
def test_one_that_is_required_begins_at_once(
    models: dict[str, Llama], answers: deque[str], name: str, text: str
) -> None:
    """Neither the end of the text is an answer then, nor any other; thoughts may come before."""
    thoughts = {QWEN3: ("", "<think>\nHm.\n</think>\n\n"), QWEN25: ("",), R1: ("Hm.\n</think>",)}
    required = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
    for before in thoughts[name]:
        made = chat(models[name], answers, before + text, **required)["message"]
        assert not made["content"]
        assert made.get("reasoning_content", "").strip() == ("Hm." if before else "")


def test_of_calls_that_are_required_one_is_made(
    models: dict[str, Llama], answers: deque[str]
) -> None:
    required = {"tools": TOOLS, "tool_choice": "required"}
    for more, n_calls in (({}, 1), ({"parallel_tool_calls": True}, 2)):
        made = chat(models[QWEN25], answers, f"{CALL}\n{CALL}", **required, **more)
        assert len(made["message"]["tool_calls"]) == n_calls


def test_thoughts_have_a_budget(models: dict[str, Llama], answers: deque[str]) -> None:
    for name, before in ((QWEN3, "<think>\n"), (R1, "")):
        text = before + "a" * 100
        long = chat(models[name], answers, text, reasoning_budget=-1)["message"]
        assert long["reasoning_content"].count("a") == 100
        short = chat(models[name], answers, text, reasoning_budget=9)["message"]
        assert 5 <= short["reasoning_content"].count("a") <= 18  # of two in a token
        assert "a" * 80 in short["content"]


def test_a_model_can_be_told_not_to_think(
    models: dict[str, Llama], answers: deque[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[bytes] = []
    tokenize = Model.tokenize

    def watched(self: Model, text: bytes, *args: Any, **given: Any) -> Any:
        prompts.append(text)
        return tokenize(self, text, *args, **given)

    monkeypatch.setattr(Model, "tokenize", watched)
    for given in ({"enable_thinking": False}, {"reasoning_budget": 0}):
        assert chat(models[QWEN3], answers, "Yes.", **given)["message"]["content"] == "Yes."
        assert any(prompt.endswith(b"<think>\n\n</think>\n\n") for prompt in prompts)
        prompts.clear()
    with pytest.raises(SettingsError, match="cannot disable reasoning"):
        chat(models[GPT_OSS], answers, "", enable_thinking=False)
    answers.clear()
    ended = chat(models[R1], answers, "Yes.", reasoning_budget=0)["message"]
    assert ended["content"] == "Yes."
    assert "reasoning_content" not in ended
    answers.clear()
    ended = chat(models[QWEN25], answers, "Yes.", reasoning_budget=9)["message"]
    assert ended["content"] == "Yes."


def test_json_comes_behind_thoughts(models: dict[str, Llama], answers: deque[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    made = chat(
        models[QWEN3],
        answers,
        '<think>\nHm.\n</think>\n\n{"a": true}',
        response_format={"type": "json_object", "schema": schema},
    )
    assert made["message"]["reasoning_content"] == "Hm.\n"
    assert made["message"]["content"] == '{"a": true}'


def test_other_formats_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    path = write_speaker(tmp_path / "a.gguf", QWEN3)
    with tiny_llama(path, chat_format="chatml", **CACHE) as llm:
        assert llm.create_chat_completion(HELLO, max_tokens=3)["choices"]
        with pytest.raises(SettingsError, match=r"^reasoning_budget: .* no chat_format$"):
            llm.create_chat_completion(HELLO, reasoning_budget=3)


OTHERWISE = '<tool_call>\n{"name": "weather","arguments": { "city":"Rome"} }\n</tool_call>'


@pytest.mark.parametrize("keep_reasoning", [False, True])
@pytest.mark.parametrize(
    "drawn",
    [
        OTHERWISE,
        f"I look.\n\n\n{OTHERWISE}",
        f"<think>\nHm.\n</think>\n\n{OTHERWISE}",
        " It is  warm.\n\n ",
    ],
    ids=["call", "said before", "thoughts before", "white space"],
)
def test_answers_that_are_rendered_otherwise_are_not_read_again(
    tmp_path: Path, answers: deque[str], drawn: str, keep_reasoning: bool
) -> None:
    """Calls as the template writes them, contents as clients strip them: the text has its own."""
    path = write_chat_gguf(tmp_path / "tiny.gguf", template(QWEN3), n_ctx_train=4096)
    messages: list[Any] = [*HELLO]
    with tiny_llama(path, **CACHE, keep_reasoning=keep_reasoning) as llm:
        for number in range(6):
            answers.append(drawn)
            n_before, n_text = llm.text.model.batcher.counts.tokens, llm.n_tokens
            made = llm.create_chat_completion(messages, tools=TOOLS, **GREEDY)
            n_read = llm.text.model.batcher.counts.tokens - n_before
            assert n_read == llm.n_tokens - n_text
            message = made["choices"][0]["message"]
            messages += [message, {"role": "user", "content": f"And on day {number}?"}]
            message["content"] = (message["content"] or "").strip()
            if not keep_reasoning:
                message.pop("reasoning_content", None)
            if OTHERWISE in drawn:
                *_, call = message["tool_calls"]
                assert call["function"]["name"] == "weather"
                for call in message["tool_calls"]:  # as clients read and write them
                    given = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(given)
                results = [
                    {"role": "tool", "content": f"{number}", "tool_call_id": call["id"]}
                    for call in message["tool_calls"]
                ]
                messages[-1:] = results
        assert llm.kv.tokens_evicted > 0


def test_samplers_that_llama_cpp_lacks(models: dict[str, Llama]) -> None:
    """A greedy text of random weights falls into a loop, which DRY breaks."""
    llm = models[QWEN3]
    dry = {"dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()}
    for complete in (
        partial(llm.create_completion, "Hi", **GREEDY),
        partial(llm.create_chat_completion, HELLO, **GREEDY),
    ):
        texts = []
        for settings in ({}, dry):
            llm.reset()
            complete(**settings)
            texts.append(llm.input_ids[: llm.n_tokens].tolist())
        assert texts[0] != texts[1]
