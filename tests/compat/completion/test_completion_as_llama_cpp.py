"""Completions equal to llama_cpp's own, where that is right."""

from __future__ import annotations

import random
from typing import Any

import llama_cpp
import pytest
from llama_cpp.llama_tokenizer import LlamaHFTokenizer

from completions import QUIET, WINDOW, complete, fed_tokens, joined, says, streamed, text_of
from drop_in_cases import COMPLETIONS, until
from pyh2o import Llama
from same_results import as_llama_cpp_names, assert_equal
from spacing_tokenizer import SpacingTokenizer
from tiny_tokens import EOS, NO_END, ONLY_ASCII

# A grammar leaves other tokens: those that the tokenizer cuts a text into that has to come.
CASES: dict[str, dict[str, Any]] = {
    **{name: case for name, case in COMPLETIONS.items() if name != "grammar"},
    "negative temperature": {"temperature": -1.0},
    "sampling options": {"top_k": 10, "top_p": 0.7, "typical_p": 0.9},
    "min p": {"top_k": 0, "top_p": 1.0, "min_p": 0.4},
    "mirostat 1": {"mirostat_mode": 1, "mirostat_tau": 3.0},
    "one token": {"max_tokens": 1},
    "end": {"logit_bias": {**ONLY_ASCII, EOS: 6.0}, "max_tokens": None},
    "own log probability": {"logprobs": 0},
    "criteria": {"stopping_criteria": until(23)},
}


@pytest.mark.parametrize("arguments", CASES.values(), ids=list(CASES))
def test_results_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, arguments: dict[str, Any]
) -> None:
    check_against(stock, ours, "A prompt", arguments)


def check_against(
    stock: llama_cpp.Llama, ours: Llama, given: str | list[int], arguments: dict[str, Any]
) -> None:
    arguments = {"max_tokens": 25, "seed": 11, "logit_bias": ONLY_ASCII, **arguments}
    expected = complete(stock, given, **arguments)
    assert_equal(expected, as_llama_cpp_names(complete(ours, given, **arguments)))
    chunks = as_llama_cpp_names(streamed(ours, given, **arguments))
    assert_equal(streamed(stock, given, **arguments), chunks)
    if arguments["max_tokens"] is None:
        assert expected["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("logprobs", [None, 2])
def test_stop_strings_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, dice: random.Random, logprobs: int | None
) -> None:
    arguments: dict[str, Any] = {"max_tokens": 40, "logit_bias": {**ONLY_ASCII, **NO_END}}
    arguments |= {"seed": dice.randrange(2**32), "logprobs": logprobs}
    text = text_of(complete(stock, "A prompt", **arguments))
    start = dice.randrange(3, len(text) - 4)
    stop = text[start : start + dice.randint(1, 4)]
    # Begins to come, again and again, but never does.
    decoys = [text[at : at + 3] + "\0" for at in dice.sample(range(len(text) - 3), k=5)]
    for stops in (stop, [*decoys, stop], decoys):
        expected = complete(stock, "A prompt", stop=stops, **arguments)
        result = complete(ours, "A prompt", stop=stops, **arguments)
        assert_equal(expected, as_llama_cpp_names(result))
        chunks = as_llama_cpp_names(streamed(ours, "A prompt", stop=stops, **arguments))
        assert_equal(streamed(stock, "A prompt", stop=stops, **arguments), chunks)
        assert joined(chunks) == text_of(expected)


def test_characters_of_several_tokens_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, dice: random.Random
) -> None:
    text = "".join(dice.choices("ab é☺\U0001f600", k=40))
    for stop in (None, "\0", "b"):
        results = [complete(model, "A", stop=stop, **says(text)) for model in (stock, ours)]
        assert_equal(*results)
        assert text_of(results[0]) == (text.partition("b")[0] if stop == "b" else text)
        assert_equal(*(streamed(model, "A", stop=stop, **says(text)) for model in (stock, ours)))


def test_a_full_window_ends_as_in_llama_cpp(stock: llama_cpp.Llama, full: Llama) -> None:
    for max_tokens in (None, 0, -1, 10_000):
        arguments = {"max_tokens": max_tokens, "seed": 2, "logit_bias": {**ONLY_ASCII, **NO_END}}
        expected = complete(stock, "A prompt", **arguments)
        assert expected["usage"]["total_tokens"] == WINDOW
        assert expected["choices"][0]["finish_reason"] == "length"
        assert_equal(expected, complete(full, "A prompt", **arguments))


def test_log_probabilities_of_an_echo(stock: llama_cpp.Llama, ours: Llama) -> None:
    arguments = {"seed": 4, "max_tokens": 5, "logit_bias": ONLY_ASCII, "logprobs": 2, "echo": True}
    expected = complete(stock, "A prompt", **arguments)
    actual = complete(ours, "A prompt", **arguments)
    # llama_cpp counts a space before the prompt that the text does not have.
    offsets = expected["choices"][0]["logprobs"]["text_offset"]
    assert offsets[:3] == [0, 1, 2]
    expected["choices"][0]["logprobs"]["text_offset"] = [max(0, each - 1) for each in offsets]
    assert_equal(expected, as_llama_cpp_names(actual))


@pytest.mark.parametrize("given", ["A prompt", "", "<s>A prompt", [5, 6, 7]])
@pytest.mark.filterwarnings("ignore:.*BOS:RuntimeWarning", "ignore:.*duplicate:RuntimeWarning")
def test_the_prompt_s_tokens_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    fed = [fed_tokens(model, monkeypatch, given) for model in (stock, ours)]
    assert fed[0] == fed[1]


def test_another_tokenizer_completes_as_llama_cpp_does(model_path: str) -> None:
    stock = llama_cpp.Llama(model_path, n_ctx=WINDOW, **QUIET)
    pieces = [stock.detokenize([token]) for token in range(stock.n_vocab())]
    tokenizer = LlamaHFTokenizer(SpacingTokenizer(pieces))
    ours = Llama(model_path, n_ctx=WINDOW, evict=False, tokenizer=tokenizer, **QUIET)
    stock.tokenizer_ = tokenizer
    words = stock._model.tokenize(b"A prompt", add_bos=True, special=False)
    # Many spaces, whose fate depends on what is before them.
    arguments = {"max_tokens": 60, "seed": 3, "logit_bias": {**ONLY_ASCII, 259: 6.0}}
    expected = complete(stock, words, **arguments)
    assert text_of(expected).count(" ") > 5
    assert_equal(expected, complete(ours, words, **arguments))
    assert joined(streamed(ours, words, **arguments)) == text_of(expected)
