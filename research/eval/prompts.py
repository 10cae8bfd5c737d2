"""Prompts of samples: their tokens, and the model's answers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate

from pyh2o.compat.llama import Llama
from pyh2o.core.detokenizer import detokenize, detokenizer
from pyh2o.writing.chat_prompt import prompt_for_message
from pyh2o.writing.writer import Writer

from .model import bos_tokens, plain_tokens
from .reading import GREEDY
from .samples import Sample

# Replaces a question that is not known yet.
_OTHER_QUESTION = "\n?"


@dataclass(frozen=True)
class Prompt:
    """The tokens of a sample.

    Attributes:
        context: can be read before the question is known.
        asked: the rest: the question, and the start of the answer.
        answer: the right one.
        places: spans of the text, [first token, one after the last], that contain the answer.
    """

    context: list[int]
    asked: list[int]
    answer: list[int]
    places: list[tuple[int, int]]

    @property
    def n_tokens(self) -> int:
        """Length of the text up to the answer."""
        return len(self.context) + len(self.asked)


class Prompter:
    """Converts samples to tokens.

    Attributes:
        is_chat: whether samples are messages of a chat, by the model's chat template.
    """

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self.is_chat = "tokenizer.chat_template" in llm.metadata

    def prompt(self, sample: Sample) -> Prompt:
        """Return the tokens of a sample."""
        tokens = self._message(sample.context + sample.question)
        # The same for every question.
        n_context = _n_common(tokens, self._message(sample.context + _OTHER_QUESTION))
        prefix = sample.prefix.lstrip() if self.is_chat else sample.prefix
        begun, whole = self._text(prefix), self._text(prefix + sample.answer)
        goes_on = whole[: len(begun)] == begun
        return Prompt(
            context=tokens[:n_context],
            asked=[*tokens[n_context:], *begun],
            answer=whole[len(begun) :] if goes_on else self._text(sample.answer),
            places=_spans(self._llm, tokens[:n_context], sample.places),
        )

    def _message(self, message: str) -> list[int]:
        if self.is_chat:
            return prompt_for_message(self._llm.text.model, message)[0]
        return [*bos_tokens(self._llm), *self._text(message)]

    def _text(self, text: str) -> list[int]:
        return plain_tokens(self._llm, text)


def _n_common(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(other)))


def _spans(llm: Llama, tokens: Sequence[int], pieces: Iterable[str]) -> list[tuple[int, int]]:
    """Return [first token, one after the last] of each piece of the text that occurs."""
    parts = detokenizer(llm.text.model, [], starts_text=False)
    texts = [parts.feed(token) for token in tokens]
    text = b"".join(texts)
    ends = list(accumulate(map(len, texts)))  # end offset of each token in bytes
    found = [(text.find(piece.encode()), len(piece.encode())) for piece in pieces]
    return [
        (bisect_right(ends, start), bisect_right(ends, start + size - 1) + 1)
        for start, size in found
        if start >= 0
    ]


def greedy_answer(llm: Llama, last: int, max_tokens: int) -> str:
    """Return the model's greedy answer after the token `last`."""
    tokens: list[int] = []
    with closing(Writer(llm, GREEDY).write([last])) as drawn:
        for token in drawn:
            if llm.text.model.is_end(token):
                break
            tokens.append(token)
            if len(tokens) == max_tokens:
                break
    parts = detokenizer(llm.text.model, [last], starts_text=False)
    return detokenize(parts, tokens).decode(errors="replace")
