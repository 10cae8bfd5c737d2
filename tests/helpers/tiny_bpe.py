"""A byte pair tokenizer for tiny models: that of SmolLM, with few tokens."""

from __future__ import annotations

from itertools import islice, product
from string import ascii_lowercase

from gguf import GGUFWriter, LlamaFileType, TokenType


def add_bpe_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    """Add <|endoftext|>, all bytes and pairs of a letter and a vowel.

    The type of the file, which OpenVINO asks for, comes with it.
    """
    pairs = list(islice(product(ascii_lowercase, "aeiou"), n_vocab - 257))
    tokens = ["<|endoftext|>", *_signs_of_bytes(), *map("".join, pairs)]
    if len(tokens) != n_vocab:
        raise ValueError(f"n_vocab must be 257 to {257 + 26 * 5}, not {n_vocab}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (n_vocab - 1)])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)


def _signs_of_bytes() -> list[str]:
    """GPT-2 writes bytes that are no sign one can see as those from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
