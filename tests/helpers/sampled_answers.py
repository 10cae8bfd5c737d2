"""Answers sampled as other tokens than the tokenizer would produce."""

from __future__ import annotations

from typing import Any

import numpy as np
from llama_cpp import LlamaGrammar

from tiny_chat import MARKS
from tiny_tokens import BYTE_0, EOS

# The tokens are a, b, aa, ab, ba and bb, which a tiny model samples about equally, and the space.
LETTERS, SPACED = "root ::= [ab]+", "root ::= [ab] [ab ]*"
NO_END_AND_NO_BYTES = {
    **{BYTE_0 + byte: -100.0 for byte in range(256)},
    **dict.fromkeys((EOS, *range(384 - len(MARKS), 384)), -100.0),
}


def sampled_alone(grammar: str = LETTERS) -> dict[str, Any]:
    """Return arguments that sample such answers."""
    return {
        "grammar": LlamaGrammar.from_string(grammar, verbose=False),
        "logit_bias": NO_END_AND_NO_BYTES,
        "temperature": 1.5,
        "repeat_penalty": 1.0,
    }


def said(content: str, *, by: str = "user") -> Any:
    """Return a message."""
    return {"role": by, "content": content}


def words(rng: np.random.Generator, n: int) -> str:
    """Return `n` words of four letters."""
    return " ".join("".join(map(chr, rng.integers(97, 123, 4))) for _ in range(n))
