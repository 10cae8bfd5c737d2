"""Where thoughts are in an answer."""

from __future__ import annotations

import pytest

from pyh2o.writing.thoughts import ThoughtMarks

THINK = ThoughtMarks()
GPT_OSS = ThoughtMarks("<|channel|>analysis<|message|>", ("<|end|>",), "<|start|>assistant")
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
        (GPT_OSS, "<|start|>assistant", f"{ANALYSIS}well<|end|><|start|>assistant{FINAL}Yes",
         f"<|start|>assistant{FINAL}Yes"),
        (GPT_OSS, "<|start|>assistant", 2 * f"{ANALYSIS}well<|end|><|start|>assistant" + FINAL,
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
    marks: ThoughtMarks, prompt: str, answer: str, left: str | None
) -> None:
    text = (prompt + answer).encode()
    found = marks.find(text, len(prompt.encode()))
    if left is None:
        assert found is None
        return
    assert found is not None
    assert (text[: found[0]] + text[found[1] :]).decode().endswith(left)
