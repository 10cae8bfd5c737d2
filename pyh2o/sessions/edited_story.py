"""A story's text that was edited by hand, as tokens to go on after."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..generation.writer import Writer
from ..llama import Llama
from ..text.beginnings import n_common
from ..text.detokenizer import CHARACTER_TOKENS, Detokenizer, detokenizer
from ..text.pieces import TextPieces
from ..text.prompt import check_prompt, prompt_tokens, suffix_tokens
from .pins import PinnedText


@dataclass(frozen=True)
class EditedStory:
    """A text and its tokens.

    Attributes:
        tokens: of the prompt and of the text behind it.
        n_prompt: how many of them count as the prompt's.
        opening: the beginning of the text, which the other tokens do not make.
    """

    tokens: list[int]
    n_prompt: int
    opening: str

    @classmethod
    def of(cls, llm: Llama, text: str, prompt: Sequence[int], *, with_prompt: bool) -> EditedStory:
        """The tokens of a text, of which as many as before are the prompt's.

        Args:
            llm: the model.
            text: as it is now.
            prompt: tokens of the prompt as it was.
            with_prompt: whether the text begins with the prompt.

        Raises:
            ValueError, ContextLimitError: as for a prompt.
        """
        if with_prompt:
            tokens = prompt_tokens(llm, text, None, None)
        else:
            tokens = [*prompt, *suffix_tokens(llm, text)]
        check_prompt(llm, tokens, llm.position_limit, llm.evicting)
        first, end = min(len(prompt), len(tokens)), len(tokens)
        data = text.encode()
        # The border may fall amid a character; at the end all of the text is the opening.
        for n_prompt in range(first, min(first + CHARACTER_TOKENS, end)):
            parts = parts_after(llm, tokens[:n_prompt])
            rest = b"".join(parts.feed(token) for token in tokens[n_prompt:])
            opening = data.removesuffix(rest)
            if data == opening + rest and opening.decode(errors="ignore").encode() == opening:
                return cls(tokens, n_prompt, opening.decode())
        return cls(tokens, end, text)


class EditableStory(PinnedText):
    """What of a story puts another text in the place of its own."""

    llm: Llama
    n_prompt: int
    finish: str | None
    _opening: str
    _ended: bool
    _writer: Writer | None
    _pieces: TextPieces

    def text(self) -> str:
        """All text given out so far, with the opening."""
        raise NotImplementedError

    def _new_pieces(self, **state: Any) -> TextPieces:
        raise NotImplementedError

    def _follow_written(self) -> None:
        raise NotImplementedError

    def edit(self, text: str) -> None:
        """Put another text in the place of all that was given out; the next `write` reads it.

        What is not read again is its beginning as far as a copy of the cache has it.
        As many of its tokens as before count as the prompt's, and the others as written.

        Args:
            text: with the prompt, if the story's text begins with it.

        Raises:
            ValueError, ContextLimitError: as for a prompt.
        """
        edited = EditedStory.of(
            self.llm, text, self.tokens[: self.n_prompt], with_prompt=bool(self._opening)
        )
        n_same = n_common(edited.tokens, self.tokens)
        pins = [(start, min(end, n_same)) for start, end in self.pins if start < n_same]
        self._text.take_model()
        self._text.replace(edited.tokens, pins)
        self.n_prompt, self._opening = edited.n_prompt, edited.opening
        self._end_at(text)

    def cut(self, n_characters: int) -> None:
        """Take back what was given out behind so many characters, and read as little as possible.

        Raises:
            ValueError, ContextLimitError: as for `edit`, if that is a part of the prompt.
        """
        text = self.text()[:n_characters]
        if len(text) < len(self._opening) or not text:
            self.edit(text)
            return
        own = text.removeprefix(self._opening)
        n_tokens, rest = cut_tokens(self.llm, self.tokens, self.n_prompt, own)
        self._text.take_model()
        self._text.set_back(n_tokens)
        self._text.tokens += rest
        self._end_at(text)

    def _end_at(self, text: str) -> None:
        """Go on behind another text than before, whose tokens are there."""
        self.finish, self._ended, self._writer = None, False, None
        self._pieces = self._new_pieces(size=len(text.encode()))
        self._follow_written()


def cut_tokens(
    llm: Llama, tokens: Sequence[int], n_prompt: int, text: str
) -> tuple[int, list[int]]:
    """The tokens of a story that ends earlier.

    Args:
        llm: the model.
        tokens: of the prompt and of the story.
        n_prompt: how many are the prompt's.
        text: the beginning of the story's own text that stays.

    Returns:
        How many of the tokens stay, and those that come behind them for the rest of a token.
    """
    parts = parts_after(llm, tokens[:n_prompt])
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    n_all, n_tokens, n_whole = 0, n_prompt, 0
    for i, token in enumerate(tokens[n_prompt:], n_prompt):
        if n_all >= len(text):
            break
        n_all += len(decoder.decode(parts.feed(token)))
        is_amid_character = bool(decoder.getstate()[0])
        if n_all <= len(text) and not is_amid_character:
            n_tokens, n_whole = i + 1, n_all
    return n_tokens, suffix_tokens(llm, text[n_whole:])


def parts_after(llm: Llama, prompt: Sequence[int]) -> Detokenizer:
    """The bytes of the tokens that a story has after its prompt."""
    return detokenizer(llm, prompt, starts_text=list(prompt) == [llm.token_bos()])
