"""Chats whose last message is the beginning of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from sampled_answers import said, sampled_alone, words
from tiny_chat import CHATML, GEMMA, LLAMA_2, LLAMA_3, write_chat_gguf
from tiny_llama import tiny_llama

SETTINGS: dict[str, Any] = {"n_ctx": 256, "hh": 24, "recent": 24, "slack": 16}
TALK = [said("Hello?"), said("Sure:\n", by="assistant")]


def prompt_of(llm: Llama, messages: list[Any], **arguments: Any) -> str:
    """The text that the model is given, with special tokens."""
    usage = llm.create_chat_completion(messages, max_tokens=1, **arguments)["usage"]
    return llm.detokenize(llm.input_ids[: usage["prompt_tokens"]].tolist(), special=True).decode()


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_start|> assistant\nSure:\n"),
        (LLAMA_3, "<|end_header_id|> \n\nSure:\n"),
        (GEMMA, "<start_of_turn> model\nSure:\n"),
    ],
    ids=["chatml", "llama 3", "gemma"],
)
def test_a_prompt_ends_where_the_last_message_does(tmp_path: Path, template: str, end: str) -> None:
    """Its white space too; and as any other prompt before."""
    with tiny_llama(write_chat_gguf(tmp_path / "tiny.gguf", template), **SETTINGS) as llm:
        prompt = prompt_of(llm, TALK, continue_final_message=True)
        assert prompt.endswith(end)
        ended = prompt_of(llm, TALK)
        assert ended.startswith(prompt.rstrip())
        assert ended != prompt


@pytest.mark.parametrize(
    ("template", "grammar"),
    [(CHATML, "root ::= [ab]+"), (LLAMA_2, 'root ::= " " [ab]+')],
    ids=["chatml", "llama 2"],
)
def test_an_answer_that_was_cut_goes_on_where_it_is(
    tmp_path: Path, rng: np.random.Generator, template: str, grammar: str
) -> None:
    with tiny_llama(write_chat_gguf(tmp_path / "tiny.gguf", template), **SETTINGS) as llm:
        messages = [said(words(rng, 30))]
        answer = llm.create_chat_completion(messages, max_tokens=20, **sampled_alone(grammar))
        text, n_there = answer["choices"][0]["message"]["content"], llm.n_tokens
        before = llm.input_ids[:n_there].tolist()
        messages.append(said(text, by="assistant"))
        more = llm.create_chat_completion(
            messages, max_tokens=5, continue_final_message=True, **sampled_alone()
        )
        assert more["usage"]["prompt_tokens"] == n_there + 1  # the newest token was not evaluated
        assert llm.input_ids[:n_there].tolist() == before
        assert text not in more["choices"][0]["message"]["content"]


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    with tiny_llama(write_chat_gguf(tmp_path / "tiny.gguf", CHATML), **SETTINGS) as llm:
        for messages in ([], TALK[:1], [{"role": "assistant", "content": None}]):
            with pytest.raises(ValueError, match="continue_final_message needs a last message"):
                llm.create_chat_completion(messages, continue_final_message=True)
        for more in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            with pytest.raises(ValueError, match="cannot follow a schema"):
                llm.create_chat_completion(TALK, continue_final_message=True, **more)
        thought = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
        with pytest.raises(ValueError, match="does not support reasoning"):
            llm.create_chat_completion([*TALK[:1], thought], continue_final_message=True)
        llm.chat_format = "zephyr"
        with pytest.raises(ValueError, match="or omit chat_format"):
            llm.create_chat_completion(TALK, continue_final_message=True)
