"""Detokenizing one token at a time, against detokenizing all tokens at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from llama_cpp.llama_tokenizer import LlamaHFTokenizer

from pyh2o.core import detokenizer as detokenizer_module
from pyh2o.core.detokenizer import CONTEXT_TOKENS, ContextDetokenizer, PieceDetokenizer, detokenize
from spacing_tokenizer import SpacingTokenizer
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_parent


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llama_cpp.Llama]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = tiny_parent(write_tiny_gguf(path, seed=1), n_ctx=64)
    yield model
    model.close()


def test_bytes_of_single_tokens_equal_bytes_of_all(
    stock: llama_cpp.Llama, dice: random.Random
) -> None:
    for first in (llama_cpp.Llama.token_bos(stock), dice.randrange(3, stock.n_vocab())):
        tokens = [first, *(dice.randrange(stock.n_vocab()) for _ in range(200))]
        tokens[1] = stock.tokenize(b" ", add_bos=False)[0]  # the space that BOS removes
        parts = PieceDetokenizer(stock._model.vocab, stock.token_bos(), starts_text=False)
        assert detokenize(parts, tokens) == stock.detokenize(tokens)


def test_a_token_may_be_longer_than_the_buffer(
    stock: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp then returns the negative size; the tiny models have no such token."""
    long_piece = b" " * (detokenizer_module.PIECE_BYTES + 1)

    def fake(vocab: Any, token: int, buffer: Any, size: int, lstrip: int, special: bool) -> int:
        if size < len(long_piece):
            return -len(long_piece)
        buffer[: len(long_piece)] = long_piece
        return len(long_piece)

    monkeypatch.setattr(detokenizer_module, "llama_token_to_piece", fake)
    assert PieceDetokenizer(stock._model.vocab, 1, starts_text=False).piece(7) == long_piece


def test_other_tokenizers_get_a_few_tokens_of_context(dice: random.Random) -> None:
    """Their characters stay complete, however many tokens they take."""
    words = [" one", " two", ",", "é", "☺", "\N{GRINNING FACE}", " \N{GRINNING FACE}"]
    pieces = [word.encode() for word in words] + [bytes([byte]) for byte in range(256)]
    tokens: list[int] = []
    for word in dice.choices(range(len(words)), k=300):
        as_bytes = [len(words) + byte for byte in pieces[word]]
        tokens += dice.choice([[word], as_bytes])
    hugging_face = SpacingTokenizer(pieces)
    tokenizer = LlamaHFTokenizer(hugging_face)
    before = [0, 1, 0]
    expected = tokenizer.detokenize(tokens, prev_tokens=before)
    hugging_face.most_tokens = 0
    assert detokenize(ContextDetokenizer(tokenizer, before), tokens) == expected
    assert hugging_face.most_tokens <= CONTEXT_TOKENS + detokenizer_module.CHARACTER_TOKENS
