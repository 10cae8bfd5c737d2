"""What is refused or warned of, and where texts longer than the window end."""

from __future__ import annotations

import itertools
from typing import Any

import llama_cpp
import pytest

from completions import SMALL_WINDOW, TRAINED_CONTEXT, WINDOW, complete, joined, streamed, text_of
from pyh2o import Llama
from pyh2o.errors import ContextLimitError
from tiny_tokens import NO_END


def test_log_probabilities_of_a_prompt_need_the_logits(evicting: Llama) -> None:
    with pytest.raises(ValueError, match="logits_all=True"):
        evicting.create_completion("A prompt", logprobs=1, echo=True)


def test_a_prompt_needs_a_token(ours: Llama) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        ours.create_completion([])


@pytest.mark.parametrize("token", [-1, 384])
def test_a_logit_bias_needs_a_token_of_the_model(ours: Llama, token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is out of range .0 to 383"):
        ours.create_completion("A prompt", logit_bias={token: 1.0})


def test_two_bos_tokens_are_warned_of(ours: Llama) -> None:
    with pytest.warns(RuntimeWarning, match="two BOS"):
        ours.create_completion("<s>A prompt", max_tokens=1)


def test_a_prompt_must_leave_a_position(full: Llama, ending: Llama) -> None:
    """The message is what llama_cpp's server looks for, and has a cure."""
    message = r"^Requested tokens \(256\) exceed context window of 256: .*raise n_ctx"
    with pytest.raises(ContextLimitError, match=message):
        full.create_completion([5] * WINDOW)
    full.create_completion([5] * (WINDOW - 1), max_tokens=1)
    message = r"^Requested tokens \(512\) exceed context window of 512: .*trained"
    with pytest.raises(ContextLimitError, match=message):
        ending.create_completion([5] * TRAINED_CONTEXT)
    ending.create_completion([5] * (TRAINED_CONTEXT - 1), max_tokens=1)


def long_prompt(model: llama_cpp.Llama) -> list[int]:
    tokens: list[int] = model.tokenize(b"once upon a time there was a window " * 20)[:300]
    assert len(tokens) == 300 > SMALL_WINDOW
    return tokens


def test_a_text_may_outgrow_the_window(evicting: Llama) -> None:
    tokens = long_prompt(evicting)
    result = complete(evicting, tokens, max_tokens=150, logit_bias=NO_END)
    assert result["usage"] == {"prompt_tokens": 300, "completion_tokens": 150, "total_tokens": 450}
    assert result["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [None, 0, -1])
def test_without_a_limit_only_the_model_ends_a_text(
    evicting: Llama, max_tokens: int | None
) -> None:
    """As the docs say; in llama_cpp the window ends it."""
    arguments: dict[str, Any] = {"max_tokens": max_tokens, "logit_bias": NO_END, "stream": True}
    chunks = evicting.create_completion("A", **arguments)
    n_chunks = 2 * evicting.n_ctx()
    assert len(list(itertools.islice(chunks, n_chunks))) == n_chunks


@pytest.mark.parametrize("max_tokens", [None, 0, 10_000])
def test_the_trained_context_ends_a_text(ending: Llama, max_tokens: int | None) -> None:
    tokens = long_prompt(ending)
    arguments = {"max_tokens": max_tokens, "logit_bias": NO_END, "seed": 1}
    result = complete(ending, tokens, **arguments)
    assert result["choices"][0]["finish_reason"] == "length"
    # The last token needs no position.
    assert TRAINED_CONTEXT <= result["usage"]["total_tokens"] <= TRAINED_CONTEXT + 1
    chunks = streamed(ending, tokens, **arguments)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert joined(chunks) == text_of(result)
