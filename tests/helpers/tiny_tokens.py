"""Tokens of the tiny models, and a logits processor that excludes some."""

from __future__ import annotations

from typing import Any

# The last is the token of byte 0; those of the other bytes follow it.
BOS, EOS, BYTE_0 = 1, 2, 3
NO_END = {EOS: -100.0}
# llama_cpp is correct if no character takes several tokens and no byte is invalid. After a BOS
# within a text, it streams log probabilities of the wrong tokens.
ONLY_ASCII = {BYTE_0 + byte: -100.0 for byte in range(128, 256)} | {BOS: -100.0}


def only_letters(_ids: Any, scores: Any) -> Any:
    """A logits processor."""
    scores[:260] = -1e9
    return scores
