"""Answers that are drawn in other tokens than those that the tokenizer cuts them into."""

from __future__ import annotations

from typing import Any

import numpy as np
from llama_cpp import LlamaGrammar

from tiny_chat import MARKS
from tiny_tokens import BYTE_0, EOS

# The tokens are a, b, aa, ab, ba and bb, which a tiny model draws about as often, and the space.
LETTERS, SPACED = "root ::= [ab]+", "root ::= [ab] [ab ]*"
NO_END_AND_NO_BYTES = {
    **{str(BYTE_0 + byte): -100.0 for byte in range(256)},
    **{str(token): -100.0 for token in (EOS, *range(384 - len(MARKS), 384))},
}
AS_DRAWN: dict[str, Any] = {
    "grammar": LETTERS,
    "logit_bias": NO_END_AND_NO_BYTES,
    "temperature": 1.5,
    "repeat_penalty": 1.0,
}


def drawn_alone() -> dict[str, Any]:
    """The same as arguments of our class."""
    return {
        "grammar": LlamaGrammar.from_string(LETTERS, verbose=False),
        "logit_bias": {int(token): bias for token, bias in NO_END_AND_NO_BYTES.items()},
        "temperature": 1.5,
        "repeat_penalty": 1.0,
    }


def said(content: str, *, by: str = "user") -> Any:
    """A message."""
    return {"role": by, "content": content}


def words(rng: np.random.Generator, n: int) -> str:
    """So many of them, of four letters each."""
    return " ".join("".join(map(chr, rng.integers(97, 123, 4))) for _ in range(n))
