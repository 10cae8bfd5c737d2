"""A chat with `Llama` goes on in its cache, whatever tokens its answers were sampled in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar

from pyh2o import Llama
from sampled_answers import SPACED, said, sampled_alone, words
from tiny_chat import CHATML, LLAMA_3, write_chat_gguf
from tiny_llama import tiny_llama

SETTINGS: dict[str, dict[str, Any]] = {
    "evicting": {"n_ctx": 256, "hh": 24, "recent": 24, "slack": 16},
    "recalling": {"n_ctx": 256, "hh": 24, "recent": 24, "slack": 16, "recall": 16},
    "full": {"n_ctx": 1024, "evict": False},
}
TRIMMING = CHATML.replace("{{ message.content }}", "{{ message.content | trim }}")


MODEL: dict[str, Any] = {"template": CHATML}


@pytest.fixture(params=SETTINGS)
def llm(request: pytest.FixtureRequest, path: Path) -> Iterator[Llama]:
    with tiny_llama(path, **SETTINGS[request.param]) as model:
        yield model


def spaced() -> LlamaGrammar:
    """Answers have spaces, and may end with some."""
    return LlamaGrammar.from_string(SPACED, verbose=False)


def ask(llm: Llama, messages: list[Any], **arguments: Any) -> tuple[str, dict[str, int]]:
    arguments = {"max_tokens": 20, **sampled_alone(), **arguments}
    answer: Any = llm.create_chat_completion(messages, **arguments)
    return answer["choices"][0]["message"]["content"], answer["usage"]


def test_a_stop_string_is_cut_off_the_tokens_too(llm: Llama, rng: np.random.Generator) -> None:
    """The history goes on behind the tokens before it, if the text ends where one does."""
    n_kept = 0
    for _ in range(6):
        messages = [said(words(rng, 4))]
        text, usage = ask(llm, messages, stop=[" "], max_tokens=200, grammar=spaced())
        sampled = llm.input_ids[usage["prompt_tokens"] : llm.n_tokens].tolist()
        messages += [said(text, by="assistant"), said("and")]
        ask(llm, messages, max_tokens=1)
        after = llm.input_ids[usage["prompt_tokens"] : llm.n_tokens].tolist()
        assert llm.detokenize(after, special=True).startswith(text.encode() + b"<|im_end|>")
        assert after[: len(sampled)] == sampled  # the stop string itself was not evaluated
        n_kept += len(sampled)
    assert n_kept > 6


@pytest.mark.parametrize("template", [TRIMMING, LLAMA_3], ids=["chatml", "llama 3"])
def test_a_template_may_strip_answers(
    template: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """White space that the model wrote last is no part of the history: the tokens before it are."""
    model = write_chat_gguf(tmp_path / "tiny.gguf", template)
    with tiny_llama(model, **SETTINGS["full"]) as llm:
        for _ in range(5):
            messages = [said(words(rng, 4))]
            text, usage = ask(llm, messages, max_tokens=12, grammar=spaced())
            before = llm.input_ids[: usage["total_tokens"] - 1].tolist()
            space = llm.tokenize(b"\n ", add_bos=False)[-1]
            messages += [said(text + " \n", by="assistant"), said("and")]
            _, usage = ask(llm, messages, max_tokens=1)
            after = llm.input_ids[: usage["prompt_tokens"]].tolist()
            assert " <|im_end|>" not in llm.detokenize(after, special=True).decode()
            while before[-1] == space:
                del before[-1]
            assert after[: len(before)] == before


def test_tokens_are_taken_as_they_are(path: Path) -> None:
    """Whoever gives tokens wants these."""
    with tiny_llama(path, **SETTINGS["full"]) as llm:
        done: Any = llm.create_completion("once", max_tokens=20, **sampled_alone())
        tokens = llm.tokenize(b"once" + done["choices"][0]["text"].encode())
        sampled = llm.input_ids[: llm.n_tokens].tolist()
        assert tokens[: len(sampled)] != sampled
        llm.create_completion(list(tokens), max_tokens=1)
        assert llm.input_ids[: len(tokens)].tolist() == tokens
        llm.create_completion(tokens, max_tokens=1)  # a text, as `tokenize` cuts it
        assert llm.input_ids[: len(sampled)].tolist() == sampled
