"""Where thoughts are in an answer."""

from __future__ import annotations

import pytest

from chat_templates import GEMMA4, GPT_OSS, QWEN3, R1, template
from pyh2o.core.native_chat import NativeTemplate
from pyh2o.writing.reasoning import ReasoningMarks, marks_of

THINK = ReasoningMarks()
CHANNELS = ReasoningMarks("<|channel|>analysis<|message|>", ("<|end|>",), "<|start|>assistant")
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("marks", "prompt", "answer", "left"),
    [
        (THINK, "<|im_start|>assistant\n", "<think>\nwell\n</think>\n\nYes.", "assistant\nYes."),
        (THINK, "<|Assistant|><think>\n", "well</think>\nYes", "<|Assistant|>Yes"),
        # thinking is turned off
        (THINK, "assistant\n<think>\n\n</think>\n\n", "Yes", "assistant\nYes"),
        (THINK, "assistant\n", "\n<think></think>\n\n<think>so\n</think> Yes", "assistant\nYes"),
        (CHANNELS, "<|start|>assistant", f"{ANALYSIS}well<|end|><|start|>assistant{FINAL}Yes",
         f"<|start|>assistant{FINAL}Yes"),
        (CHANNELS, "<|start|>assistant", 2 * f"{ANALYSIS}well<|end|><|start|>assistant" + FINAL,
         f"<|start|>assistant{FINAL}"),
        # no thoughts, or without an end, or talk of them
        (THINK, "assistant\n", "Yes", None),
        (THINK, "assistant\n", "<think>well", None),
        (THINK, "assistant\n<think>\n", "well", None),
        (THINK, "assistant\n", "One writes <think>so</think> here", None),
        (THINK, "user: is it <think>so</think>? assistant: ", "Yes", None),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out(
    marks: ReasoningMarks, prompt: str, answer: str, left: str | None
) -> None:
    text = (prompt + answer).encode()
    found = marks.find(text, len(prompt.encode()))
    if left is None:
        assert found is None
        return
    assert found is not None
    assert (text[: found[0]] + text[found[1] :]).decode().endswith(left)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("name", "thinking", "answer"),
    [
        (QWEN3, True, "<think>\nwell\n</think>\n\nYes."),
        (QWEN3, False, "Yes."),
        (R1, True, "well\n</think>\n\nYes."),
        (R1, True, "well</think>Yes."),
        (GPT_OSS, True, f"{ANALYSIS}well<|end|><|start|>assistant{FINAL}Yes."),
        (GEMMA4, True, "<|channel>thought\nwell<channel|>Yes."),
    ],
)
def test_a_text_without_its_thoughts_begins_the_next_prompt(
    name: str, thinking: bool, answer: str
) -> None:
    """As the templates of known models write it, of a history without thoughts."""
    native = NativeTemplate(template(name), "<s>", "</s>")
    before = native.apply([said("user", "Yes?")], enable_thinking=thinking).prompt
    history = [said("user", "Yes?"), said("assistant", "Yes."), said("user", "No?")]
    behind = native.apply(history, enable_thinking=thinking).prompt
    text = (before + answer).encode()
    found = marks_of(template(name)).find(text, len(before.encode()))
    assert found is not None
    assert behind.encode().startswith(text[: found[0]] + text[found[1] :])
