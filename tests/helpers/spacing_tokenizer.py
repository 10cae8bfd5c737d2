"""A tokenizer other than llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence


class SpacingTokenizer:
    """Decodes like Hugging Face's Llama tokenizers: no space before the first word of a text."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.most_tokens = 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        self.most_tokens = max(self.most_tokens, len(tokens))
        data = b"".join(self.pieces[token] for token in tokens)
        return data.decode(errors="replace").removeprefix(" ")
