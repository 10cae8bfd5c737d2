"""Prompts in the tokens that were sampled: their text is the same, whatever was recorded."""

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
    """The bytes of each token."""
    parts = PieceDetokenizer(llm._model.vocab, llm.token_bos(), starts_text=False)
    return [parts.piece(token) for token in range(llm.n_vocab())]


@functools.cache
def tokens_of_bytes(llm: Llama) -> dict[int, list[int]]:
    """The tokens that are one byte each."""
    tokens: dict[int, list[int]] = {}
    for token, piece in enumerate(vocabulary(llm)):
        if len(piece) == 1:
            tokens.setdefault(piece[0], []).append(token)
    return tokens


def in_bytes(llm: Llama, tokens: Sequence[int]) -> list[int]:
    """The bytes of a text, and special tokens, that have none, by their negative number."""
    found: list[int] = []
    for token in tokens:
        found += vocabulary(llm)[token] or [-token]
    return found


def cut_otherwise(
    llm: Llama, tokens: Sequence[int], rng: np.random.Generator, share: float = 0.3
) -> list[int]:
    """Such a share of the tokens in their bytes, or in a letter for each."""
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
    """Of few parts, so that many begin likewise."""
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


# -------------------------------------------------------------------------------------------------
# The text
# -------------------------------------------------------------------------------------------------


def test_the_text_of_a_prompt_is_the_same_in_other_tokens(llm: Llama, cases: Cases) -> None:
    """Invariant 12, whatever texts were recorded, and wherever the prompt leaves them."""
    n_others = 0
    for _, rng in cases(range(60)):
        sampled = SampledTexts(most_tokens=600)
        begin = random_text(llm, rng, 4)
        for _ in range(12):
            text = begin + random_text(llm, rng, int(rng.integers(1, 30)))
            recorded = cut_otherwise(llm, cut(llm, text), rng)
            n_prompt = int(rng.integers(0, len(recorded)))
            sampled.record(recorded[:n_prompt], recorded[n_prompt:])
            prompt = text[: int(rng.integers(1, len(text) + 1))]
            prompt += random_text(llm, rng, int(rng.integers(0, 4)))
            tokens = cut(llm, prompt)
            as_sampled = sampled.as_sampled(llm.text.model, tokens)
            assert in_bytes(llm, as_sampled) == in_bytes(llm, tokens)
            n_others += as_sampled != tokens
    assert n_others > 100


def test_a_turn_that_comes_back_is_in_its_tokens(llm: Llama, cases: Cases) -> None:
    """Where it ended with a special token, white space, or the prompt itself."""
    special = "<|endoftext|>" if llm.token_bos() == llm.token_eos() else USER_DEFINED[0]
    for end, rng in cases([special, "\n", " \n", ""] * 8):
        text = f"{special}{words(rng, 3)}{special}aababbab baba"
        sampled = cut_otherwise(llm, cut(llm, text), rng)
        texts = SampledTexts()
        texts.record([], [*sampled, *cut(llm, "ab")[-1:]])
        tokens = cut(llm, text + end + (end and words(rng, 3)))
        as_sampled = texts.as_sampled(llm.text.model, tokens)
        assert as_sampled[: len(sampled)] == sampled
        assert as_sampled[len(sampled) :] == (
            tokens[-len(as_sampled) + len(sampled) :] if end else []
        )


def test_a_text_that_goes_on_otherwise_gets_nothing(llm: Llama, rng: np.random.Generator) -> None:
    """Of what another one has sampled in the midst of a turn, not even what both begin with."""
    sampled = SampledTexts()
    sampled.record(cut(llm, "baba"), [cut(llm, letter)[-1] for letter in "ababab"])
    for text in ("babaabc", "babaababac", "bab", "x", "babaababababa"):
        tokens = cut(llm, text)
        assert sampled.as_sampled(llm.text.model, tokens) == tokens


def test_a_special_token_is_not_the_text_that_looks_like_it(llm: Llama) -> None:
    mark = "<|endoftext|>" if llm.token_bos() == llm.token_eos() else "</s>"
    spelled = list(llm.tokenize(f"ab{mark}\n".encode(), special=False))
    sampled = SampledTexts()
    sampled.record([], spelled)
    tokens = cut(llm, f"ab{mark}\nab")
    assert sampled.as_sampled(llm.text.model, tokens)[: len(spelled)] != spelled
    looks_alike = list(llm.tokenize(f"ab{mark}\nab".encode(), special=False))
    sampled.record([], tokens)
    assert sampled.as_sampled(llm.text.model, looks_alike) == looks_alike


def test_a_special_token_is_not_any_bytes(llm: Llama) -> None:
    """Not even those that no text has."""
    special = llm.token_bos()
    looks_alike = [tokens_of_bytes(llm)[byte][0] for byte in b"\xff" + special.to_bytes(4, "big")]
    newline = cut(llm, "a\n")[-1]
    for tokens, others in ([special], looks_alike), (looks_alike, [special]):
        sampled = SampledTexts()
        sampled.record([], [*others, newline])
        assert sampled.as_sampled(llm.text.model, [*tokens, newline]) == [*tokens, newline]


# -------------------------------------------------------------------------------------------------
# Which text, and how many
# -------------------------------------------------------------------------------------------------


def test_the_newest_of_equal_texts_counts(llm: Llama, cases: Cases) -> None:
    """Though an older one went on as the prompt does; and though its tokens are the tokenizer's."""
    prompt, answer, question = cut(llm, "abba\n"), "abbaabbababb", "\n x\n"
    tokens = cut(llm, "abba\n" + answer)
    asked = cut(llm, "abba\n" + answer + question)
    for _, rng in cases(range(10)):
        answers = [cut_otherwise(llm, tokens[len(prompt) :], rng) for _ in range(3)]
        sampled = SampledTexts()
        for each in (*answers, tokens[len(prompt) :], answers[0]):
            sampled.record(prompt, each)
            recorded = [*prompt, *each]
            assert sampled.as_sampled(llm.text.model, asked) == recorded + asked[len(tokens) :]
            sampled.record(recorded + asked[len(tokens) :], cut(llm, "a")[-1:])


def test_the_longest_text_counts(llm: Llama, rng: np.random.Generator) -> None:
    """However new another one is that the prompt leaves earlier."""
    tokens = cut(llm, "abbaabba\nbababb\nabbabba")
    sampled = SampledTexts()
    longest = cut_otherwise(llm, tokens, rng, 1.0)
    sampled.record([], longest)
    sampled.record([], cut_otherwise(llm, cut(llm, "abbaabba\nx"), rng, 1.0))
    assert sampled.as_sampled(llm.text.model, tokens) == longest


def test_what_nobody_drew_is_left_to_the_tokenizer(llm: Llama, cases: Cases) -> None:
    """Even where it was recorded in other tokens."""
    tokens = cut(llm, "abbaabba\nbababb\n")
    n_others = 0
    for _, rng in cases(range(10)):
        prompt = cut_otherwise(llm, tokens, rng)
        sampled = SampledTexts()
        sampled.record(prompt, cut(llm, "x")[-1:])
        assert sampled.as_sampled(llm.text.model, tokens) == tokens
        n_others += prompt != tokens
    assert n_others > 0


def test_what_is_noted_has_an_end(llm: Llama, rng: np.random.Generator) -> None:
    """Texts that were used lately stay."""
    sampled = SampledTexts(most_tokens=200)
    texts = [f"{chr(97 + i)} text " + "ab" * 4 + "\n" for i in range(26)]
    spelled = [cut_otherwise(llm, cut(llm, text), rng, 1.0) for text in texts]
    for tokens in spelled:
        sampled.record([], tokens)
        assert sampled._count() <= 200
        assert sampled.as_sampled(llm.text.model, cut(llm, texts[0])) == spelled[0]
        assert sampled.as_sampled(llm.text.model, cut(llm, texts[spelled.index(tokens)])) == tokens
    assert sampled.as_sampled(llm.text.model, cut(llm, texts[1])) == cut(llm, texts[1])
    sampled.record([], [5] * 201)
    assert sampled.as_sampled(llm.text.model, cut(llm, texts[0])) == spelled[0]


def test_no_more_texts_are_noted_than_a_prompt_can_be_compared_with(llm: Llama) -> None:
    sampled = SampledTexts(most_texts=3)
    for first in range(100, 110):
        sampled.record([first], [1, 2])
    assert sampled._count() == 3 * 3


# -------------------------------------------------------------------------------------------------
# For which prompts
# -------------------------------------------------------------------------------------------------


def test_tokens_that_somebody_made_are_no_text(llm: Llama) -> None:
    tokens = llm.tokenize(b"abc")
    assert isinstance(tokens, TextTokens)
    assert is_text("abc", None)
    assert is_text(tokens, None)
    assert not is_text(tokens[:2], None)
    assert not is_text(list(tokens), None)
    assert not is_text("abc", "def")


def test_other_tokenizers_are_left_alone(
    llm: Llama, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens have no text of their own."""
    sampled = SampledTexts()
    sampled.record([], cut_otherwise(llm, cut(llm, "abab\n"), rng, 1.0))
    tokens = cut(llm, "abab\n")
    other = LlamaHFTokenizer(SpacingTokenizer([b" a"]))
    monkeypatch.setattr(llm.text.model, "tokenizer", other)
    assert sampled.as_sampled(llm.text.model, tokens) is tokens


# -------------------------------------------------------------------------------------------------
# Answers that a template renders otherwise
# -------------------------------------------------------------------------------------------------


def test_an_answer_is_known_by_what_a_template_makes_of_it(tmp_path: Path) -> None:
    """As it was sampled it is known, too; and so are answers before it, when the text goes on."""
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
            sampled.record_rendered(model, recorded, there, b"thought")  # which it has not
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
