"""Text, ends and log probabilities where llama_cpp is not right: against naive programs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import llama_cpp
from llama_cpp import LogitsProcessorList, StoppingCriteriaList

from completions import complete, joined, says, streamed, text_of
from pyh2o import Llama
from same_results import assert_equal
from tiny_tokens import BYTE_0, EOS, ONLY_ASCII, only_letters


def naive_completion(
    model: llama_cpp.Llama, given: str, stops: Sequence[str], max_tokens: int, seed: int
) -> tuple[str, int, str]:
    """Text, number of tokens and finish reason, decoding everything again for each token."""
    model.reset()
    model.set_seed(seed)
    tokens: list[int] = []
    # The default of create_completion; that of generate is another one.
    for token in model.generate(model.tokenize(given.encode()), temp=0.8):
        if token == EOS:
            return model.detokenize(tokens).decode(errors="ignore"), len(tokens), "stop"
        tokens.append(token)
        data = model.detokenize(tokens)
        found = min((at for stop in stops if (at := data.find(stop.encode())) >= 0), default=-1)
        if found >= 0:
            return data[:found].decode(errors="ignore"), len(tokens), "stop"
        if len(tokens) == max_tokens:
            return data.decode(errors="ignore"), len(tokens), "length"
    raise AssertionError("the generator ended")


def test_broken_characters_and_stop_strings(
    stock: llama_cpp.Llama, ours: Llama, dice: random.Random
) -> None:
    """The model's text is full of bytes that are no UTF-8."""
    for _ in range(10):
        max_tokens, seed = dice.randint(1, 100), dice.randrange(2**32)
        whole, _, _ = naive_completion(stock, "A prompt", [], 100, seed)
        starts = dice.choices(range(len(whole)), k=dice.randint(0, 4)) if whole else []
        stops = [whole[start : start + dice.randint(1, 4)] for start in starts]
        text, n_tokens, reason = naive_completion(stock, "A prompt", stops, max_tokens, seed)

        arguments = {"max_tokens": max_tokens, "stop": stops, "seed": seed}
        result = complete(ours, "A prompt", **arguments)
        assert result["choices"][0]["text"] == text
        assert result["choices"][0]["finish_reason"] == reason
        assert result["usage"]["completion_tokens"] == n_tokens
        chunks = streamed(ours, "A prompt", **arguments)
        assert joined(chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_an_empty_prompt_begins_the_text(ours: Llama) -> None:
    """The space that the tokenizer puts before a text is not part of it."""
    assert text_of(complete(ours, "", **says(" a b"))) == "a b"
    assert joined(streamed(ours, "", **says(" a b"))) == "a b"
    assert text_of(complete(ours, "A", **says(" a b"))) == " a b"


def test_an_empty_stop_string_is_none(ours: Llama) -> None:
    assert text_of(complete(ours, "A", stop="", **says("abc"))) == "abc"
    assert text_of(complete(ours, "A", stop=["", "c"], **says("abc"))) == "ab"


def test_stop_strings_may_be_a_tuple(ours: Llama) -> None:
    """llama_cpp takes no notice of any then."""
    assert text_of(complete(ours, "A", stop=("c", "d"), **says("abc"))) == "ab"


def test_a_chunk_comes_with_its_token(ours: Llama) -> None:
    ours.reset()
    chunks = ours.create_completion("A prompt", stream=True, logit_bias=ONLY_ASCII, seed=1)
    next(chunks)
    assert ours.n_tokens == len(ours.tokenize(b"A prompt"))
    next(chunks)
    assert ours.n_tokens == len(ours.tokenize(b"A prompt")) + 1


def test_log_probabilities_of_characters_of_several_tokens(ours: Llama) -> None:
    """A chunk has an entry for each of its tokens, and all chunks together those of the result."""
    text = "aébc☺"
    result = complete(ours, "Aé", logprobs=2, **says(text))
    logprobs = result["choices"][0]["logprobs"]
    one, other = ([f"bytes:\\x{byte:02x}" for byte in sign.encode()] for sign in "é☺")
    assert logprobs["tokens"] == ["a", *one, "b", "c", *other]
    assert logprobs["text_offset"] == [2, 3, 3, 4, 5, 6, 6, 6]
    chunks = streamed(ours, "Aé", logprobs=2, **says(text))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [len(part["tokens"]) for part in parts] == [1, 2, 1, 1, 3]
    assert_equal(logprobs, {key: [x for part in parts for x in part[key]] for key in logprobs})


def test_the_echo_of_tokens_is_their_text(ours: Llama) -> None:
    tokens = ours.tokenize(b"A prompt")
    result = complete(ours, tokens, max_tokens=3, echo=True, logprobs=1, logit_bias=ONLY_ASCII)
    assert text_of(result).startswith("A prompt")
    assert result["choices"][0]["logprobs"]["text_offset"][-3] == len("A prompt")


def test_logit_bias_joins_the_processors(ours: Llama) -> None:
    processors = LogitsProcessorList([only_letters])
    arguments = {"logits_processor": processors, "max_tokens": 10, "temperature": 0.0}
    only_z = {ours.tokenize(b"z", add_bos=False)[-1]: 1e9}
    assert text_of(complete(ours, "A", logit_bias=only_z, **arguments)) == "z" * 10
    still_banned = {BYTE_0 + ord("!"): 1000.0}
    assert "!" not in text_of(complete(ours, "A", logit_bias=still_banned, **arguments))
    assert processors == [only_letters]


def test_criteria_are_not_asked_after_the_end(ours: Llama) -> None:
    """A criterion that is met later, such as a time, must not undo a stop string."""
    asked: list[int] = []

    def fourth_time(ids: Any, logits: Any) -> bool:
        asked.append(len(ids))
        return len(asked) >= 4

    criteria = StoppingCriteriaList([fourth_time])
    result = complete(ours, "A", stopping_criteria=criteria, stop="c", **says("abcdef"))
    assert text_of(result) == "ab"
    assert len(asked) == 3
