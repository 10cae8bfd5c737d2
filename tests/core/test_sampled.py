"""A prompt reuses the sampled tokens of recorded texts without changing its text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from llama_cpp.llama_tokenizer import LlamaHFTokenizer

from pyh2o import Llama
from pyh2o.core.detokenizer import PieceDetokenizer
from pyh2o.core.sampled import SampledTexts, TextTokens, is_text
from pyh2o.core.vocabulary import suffix_tokens
from random_cases import Cases
from sampled_answers import words
from spacing_tokenizer import SpacingTokenizer
from tiny_chat import CHATML, MARKS, write_chat_gguf
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

USER_DEFINED = ("<start_of_turn>",)


@pytest.fixture(scope="module", params=["SentencePiece", "user defined", "byte pairs"])
def llm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Llama]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    if request.param == "byte pairs":
        write_tiny_gguf(path, seed=1, bpe=True)
    else:
        marks = USER_DEFINED if request.param == "user defined" else ()
        write_chat_gguf(path, CHATML, user_defined=marks)
    with tiny_llama(path, n_ctx=64, hh=8, recent=8) as model:
        yield model


def cut(llm: Llama, text: str) -> list[int]:
    return list(llm.tokenize(text.encode(), special=True))


@functools.cache
def vocabulary(llm: Llama) -> list[bytes]:
    """Return the bytes of each token."""
    parts = PieceDetokenizer(llm._model.vocab, llm.token_bos(), starts_text=False)
    return [parts.piece(token) for token in range(llm.n_vocab())]


@functools.cache
def tokens_of_bytes(llm: Llama) -> dict[int, list[int]]:
    """Return the tokens of one byte each."""
    tokens: dict[int, list[int]] = {}
    for token, piece in enumerate(vocabulary(llm)):
        if len(piece) == 1:
            tokens.setdefault(piece[0], []).append(token)
    return tokens


def in_bytes(llm: Llama, tokens: Sequence[int]) -> list[int]:
    """Return the bytes of a text, with special tokens as negative numbers."""
    found: list[int] = []
    for token in tokens:
        found += vocabulary(llm)[token] or [-token]
    return found


def split_randomly(
    llm: Llama, tokens: Sequence[int], rng: np.random.Generator, share: float = 0.3
) -> list[int]:
    """Replace this share of the tokens by their bytes or by a token per letter."""
    of_bytes = tokens_of_bytes(llm)
    sampled: list[int] = []
    for token in tokens:
        piece = vocabulary(llm)[token]
        if piece and rng.random() < share:
            sampled += [int(rng.choice(of_bytes[byte])) for byte in piece]
        else:
            sampled.append(token)
    return sampled


def random_text(llm: Llama, rng: np.random.Generator, n: int) -> str:
    """Return a text of few distinct parts, so that many texts share a prefix."""
    parts = [
        "aba",
        "bab",
        " ",
        "\n",
        "  ",
        "é",
        "ÿ",
        "日",
        *MARKS[:2],
        *USER_DEFINED,
        "</s>",
        "<|endoftext|>",
    ]
    return "".join(rng.choice(parts, n))


def test_reused_tokens_keep_the_text_of_a_prompt(llm: Llama, cases: Cases) -> None:
    """Invariant 12, for any recorded texts and any point where the prompt leaves them."""
    n_others = 0
    for _, rng in cases(range(60)):
        sampled = SampledTexts(most_tokens=600)
        begin = random_text(llm, rng, 4)
        for _ in range(12):
            text = begin + random_text(llm, rng, int(rng.integers(1, 30)))
            recorded = split_randomly(llm, cut(llm, text), rng)
            n_prompt = int(rng.integers(0, len(recorded)))
            sampled.record(recorded[:n_prompt], recorded[n_prompt:])
            prompt = text[: int(rng.integers(1, len(text) + 1))]
            prompt += random_text(llm, rng, int(rng.integers(0, 4)))
            tokens = cut(llm, prompt)
            as_sampled = sampled.as_sampled(llm.text.model, tokens)
            assert in_bytes(llm, as_sampled) == in_bytes(llm, tokens)
            n_others += as_sampled != tokens
    assert n_others > 100


def test_a_repeated_turn_uses_its_sampled_tokens(llm: Llama, cases: Cases) -> None:
    """If it ends with a special token, white space, or the prompt itself."""
    special = "<|endoftext|>" if llm.token_bos() == llm.token_eos() else USER_DEFINED[0]
    for end, rng in cases([special, "\n", " \n", ""] * 8):
        text = f"{special}{words(rng, 3)}{special}aababbab baba"
        sampled = split_randomly(llm, cut(llm, text), rng)
        texts = SampledTexts()
        texts.record([], [*sampled, *cut(llm, "ab")[-1:]])
        tokens = cut(llm, text + end + (end and words(rng, 3)))
        as_sampled = texts.as_sampled(llm.text.model, tokens)
        assert as_sampled[: len(sampled)] == sampled
        assert as_sampled[len(sampled) :] == (
            tokens[-len(as_sampled) + len(sampled) :] if end else []
        )


def test_a_text_that_differs_within_a_turn_reuses_nothing(
    llm: Llama, rng: np.random.Generator
) -> None:
    """Not even the prefix that both share."""
    sampled = SampledTexts()
    sampled.record(cut(llm, "baba"), [cut(llm, letter)[-1] for letter in "ababab"])
    for text in ("babaabc", "babaababac", "bab", "x", "babaababababa"):
        tokens = cut(llm, text)
        assert sampled.as_sampled(llm.text.model, tokens) == tokens


def test_a_special_token_differs_from_text_that_looks_like_it(llm: Llama) -> None:
    mark = "<|endoftext|>" if llm.token_bos() == llm.token_eos() else "</s>"
    spelled = list(llm.tokenize(f"ab{mark}\n".encode(), special=False))
    sampled = SampledTexts()
    sampled.record([], spelled)
    tokens = cut(llm, f"ab{mark}\nab")
    assert sampled.as_sampled(llm.text.model, tokens)[: len(spelled)] != spelled
    looks_alike = list(llm.tokenize(f"ab{mark}\nab".encode(), special=False))
    sampled.record([], tokens)
    assert sampled.as_sampled(llm.text.model, looks_alike) == looks_alike


def test_a_special_token_matches_no_bytes(llm: Llama) -> None:
    """Not even bytes that occur in no text."""
    special = llm.token_bos()
    looks_alike = [tokens_of_bytes(llm)[byte][0] for byte in b"\xff" + special.to_bytes(4, "big")]
    newline = cut(llm, "a\n")[-1]
    for tokens, others in ([special], looks_alike), (looks_alike, [special]):
        sampled = SampledTexts()
        sampled.record([], [*others, newline])
        assert sampled.as_sampled(llm.text.model, [*tokens, newline]) == [*tokens, newline]


def test_the_newest_of_equal_texts_is_used(llm: Llama, cases: Cases) -> None:
    """Even if an older one continues like the prompt or has the tokenizer's tokens."""
    prompt, answer, question = cut(llm, "abba\n"), "abbaabbababb", "\n x\n"
    tokens = cut(llm, "abba\n" + answer)
    asked = cut(llm, "abba\n" + answer + question)
    for _, rng in cases(range(10)):
        answers = [split_randomly(llm, tokens[len(prompt) :], rng) for _ in range(3)]
        sampled = SampledTexts()
        for each in (*answers, tokens[len(prompt) :], answers[0]):
            sampled.record(prompt, each)
            recorded = [*prompt, *each]
            assert sampled.as_sampled(llm.text.model, asked) == recorded + asked[len(tokens) :]
            sampled.record(recorded + asked[len(tokens) :], cut(llm, "a")[-1:])


def test_the_longest_matching_text_is_used(llm: Llama, rng: np.random.Generator) -> None:
    """Even if a text that matches less is newer."""
    tokens = cut(llm, "abbaabba\nbababb\nabbabba")
    sampled = SampledTexts()
    longest = split_randomly(llm, tokens, rng, 1.0)
    sampled.record([], longest)
    sampled.record([], split_randomly(llm, cut(llm, "abbaabba\nx"), rng, 1.0))
    assert sampled.as_sampled(llm.text.model, tokens) == longest


def test_tokens_that_were_not_sampled_come_from_the_tokenizer(llm: Llama, cases: Cases) -> None:
    """Even if they were recorded as other tokens."""
    tokens = cut(llm, "abbaabba\nbababb\n")
    n_others = 0
    for _, rng in cases(range(10)):
        prompt = split_randomly(llm, tokens, rng)
        sampled = SampledTexts()
        sampled.record(prompt, cut(llm, "x")[-1:])
        assert sampled.as_sampled(llm.text.model, tokens) == tokens
        n_others += prompt != tokens
    assert n_others > 0


def test_the_number_of_recorded_texts_is_limited(llm: Llama, rng: np.random.Generator) -> None:
    """Recently used texts stay."""
    sampled = SampledTexts(most_tokens=200)
    texts = [f"{chr(97 + i)} text " + "ab" * 4 + "\n" for i in range(26)]
    spelled = [split_randomly(llm, cut(llm, text), rng, 1.0) for text in texts]
    for tokens in spelled:
        sampled.record([], tokens)
        assert sampled._count() <= 200
        assert sampled.as_sampled(llm.text.model, cut(llm, texts[0])) == spelled[0]
        assert sampled.as_sampled(llm.text.model, cut(llm, texts[spelled.index(tokens)])) == tokens
    assert sampled.as_sampled(llm.text.model, cut(llm, texts[1])) == cut(llm, texts[1])
    sampled.record([], [5] * 201)
    assert sampled.as_sampled(llm.text.model, cut(llm, texts[0])) == spelled[0]


def test_no_more_texts_are_recorded_than_a_prompt_is_compared_with(llm: Llama) -> None:
    sampled = SampledTexts(most_texts=3)
    for first in range(100, 110):
        sampled.record([first], [1, 2])
    assert sampled._count() == 3 * 3


def test_only_unchanged_tokens_of_a_text_are_text(llm: Llama) -> None:
    tokens = llm.tokenize(b"abc")
    assert isinstance(tokens, TextTokens)
    assert is_text("abc", None)
    assert is_text(tokens, None)
    assert not is_text(tokens[:2], None)
    assert not is_text(list(tokens), None)
    assert not is_text("abc", "def")


def test_other_tokenizers_are_not_used(
    llm: Llama, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens have no separate text."""
    sampled = SampledTexts()
    sampled.record([], split_randomly(llm, cut(llm, "abab\n"), rng, 1.0))
    tokens = cut(llm, "abab\n")
    other = LlamaHFTokenizer(SpacingTokenizer([b" a"]))
    monkeypatch.setattr(llm.text.model, "tokenizer", other)
    assert sampled.as_sampled(llm.text.model, tokens) is tokens


def test_an_answer_is_recognised_as_rendered_by_the_template(tmp_path: Path) -> None:
    """Also as it was sampled; the answers before it are recognised when the text continues."""
    before, behind = "<|im_start|>user\naba<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\nb"
    with tiny_llama(write_chat_gguf(tmp_path / "tiny.gguf", CHATML), n_ctx=64) as llm:
        model, sampled, text = llm.text.model, SampledTexts(), list[int]()
        rendered = ""
        for number in range(3):
            rendered += before
            prompt = sampled.as_sampled(model, cut(llm, rendered))
            assert prompt[: len(text)] == text
            answer = suffix_tokens(model, f"a  {number}")
            recorded = sampled.record(prompt, answer)
            own = sampled.as_sampled(model, cut(llm, rendered + f"a  {number}{behind}"))
            assert own[: len(prompt) + len(answer)] == [*prompt, *answer]
            rendered += f"a{number}"
            there = cut(llm, rendered + behind)
            sampled.record_rendered(model, recorded, there, b"thought")  # the answer has none
            assert sampled.as_sampled(model, there)[: len(prompt) + len(answer)] != [
                *prompt,
                *answer,
            ]
            sampled.record_rendered(model, recorded, there, b"")
            text = [*prompt, *answer]
            for known in (there, cut(llm, rendered + "<|im_end|>")):
                assert sampled.as_sampled(model, known)[: len(text)] == text
            assert sampled.as_sampled(model, cut(llm, f"{rendered}0{behind}"))[: len(text)] != text
            rendered += behind
