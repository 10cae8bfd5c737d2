"""The texts of single tokens, and where each ends in the text of all."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ..core.detokenizer import Detokenizer, PieceDetokenizer, detokenizer
from ..core.model import Model
from ..writing.cached_text import Span


class TokenTexts:
    """Texts of the tokens of a text that grows, or is set back.

    A character of several tokens is the last one's. What is no character has no text.

    Attributes:
        texts: of each token.
        ends: characters up to the end of each token.
    """

    def __init__(self, *, special: bool) -> None:
        """`special` gives the marks of a chat template their text."""
        self.texts: list[str] = []
        self.ends: list[int] = []
        self._special = special
        self._tokens: list[int] = []

    def follow(self, model: Model, tokens: Sequence[int]) -> None:
        """Be those of these tokens; only what is new is looked at."""
        n = len(self._tokens)
        if n == 0 or list(tokens[:n]) != self._tokens:
            self._begin(model)
            n = 0
        for token in tokens[n:]:
            text = self._decoder.decode(self._parts.feed(token))
            self.texts.append(text)
            self.ends.append((self.ends[-1] if self.ends else 0) + len(text))
        self._tokens = list(tokens)

    def _begin(self, model: Model) -> None:
        self.texts, self.ends = [], []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        parts = detokenizer(model, [], starts_text=True)
        if self._special and isinstance(parts, PieceDetokenizer):
            parts = PieceDetokenizer(
                model.native.vocab, model.token_bos(), starts_text=True, special=True
            )
        self._parts = parts

    def span(self, start: int, end: int) -> Span:
        """The tokens of these characters, of which there is one at least."""
        return bisect_right(self.ends, start), bisect_left(self.ends, end) + 1


def whole_tokens(parts: Detokenizer, tokens: Sequence[int], text: str) -> tuple[int, int]:
    """How many of the first tokens make a beginning of a text, and how many characters it has."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    n_all = n_tokens = n_characters = 0
    for n, token in enumerate(tokens, 1):
        if n_all >= len(text):
            break
        n_all += len(decoder.decode(parts.feed(token)))
        is_amid_character = bool(decoder.getstate()[0])
        if n_all <= len(text) and not is_amid_character:
            n_tokens, n_characters = n, n_all
    return n_tokens, n_characters
