"""Samples as a model is asked them: their tokens, and what it answers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate

from pyh2o.generation.writer import Writer
from pyh2o.llama import Llama
from pyh2o.text.chat_template import ChatTemplate
from pyh2o.text.detokenizer import detokenize, detokenizer
from pyh2o.text.vocabulary import is_end_token

from .model import bos_tokens, plain_tokens
from .reading import GREEDY
from .samples import Question, Sample

# Stands for a question that is not known yet.
_OTHER_QUESTION = "\n?"


@dataclass(frozen=True)
class Turn:
    """The tokens of a question.

    Attributes:
        read: all that comes behind the context or the turn before: the right answer to that one,
            the question, and the beginning of the answer.
        answer: the right one.
        rival: the wrong one that it is compared with; perhaps none.
        places: spans of the text, [first token, one behind the last], that have the answer in them.
    """

    read: list[int]
    answer: list[int]
    rival: list[int]
    places: list[tuple[int, int]]


@dataclass(frozen=True)
class Prompt:
    """The tokens of a sample.

    Attributes:
        context: what can be read before any question is known.
        turns: the questions.
        apart: whether each of them stands behind the context alone.
    """

    context: list[int]
    turns: list[Turn]
    apart: bool = False

    @property
    def n_tokens(self) -> int:
        """Of the text up to the last answer."""
        sizes = [len(turn.read) for turn in self.turns]
        return len(self.context) + (max(sizes) if self.apart else sum(sizes))


class Prompter:
    """Turns samples into tokens, through the model's chat template if it has one."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        has_template = "tokenizer.chat_template" in llm.metadata
        self._template = ChatTemplate(llm, None) if has_template else None

    @property
    def is_chat(self) -> bool:
        """Whether samples are asked in a chat."""
        return self._template is not None

    def prompt(self, sample: Sample) -> Prompt:
        """The tokens of a sample."""
        of_context = sample.questions if sample.apart else sample.questions[:1]
        all_asked = [self._asked(sample.context + one.text) for one in of_context]
        # The same for every question.
        other = self._asked(sample.context + _OTHER_QUESTION)
        n_context = min(_n_common(tokens, other) for tokens in all_asked)
        context = other[:n_context]
        spelt = Spelt(self._llm, context)
        turns = [
            self._turn(spelt, tokens[n_context:], question)
            for tokens, question in zip(all_asked, of_context, strict=True)
        ]
        for question in sample.questions[len(of_context) :]:
            asked = [*turns[-1].answer, *self._asked_next(question.text)]
            turns.append(self._turn(spelt, asked, question))
        return Prompt(context, turns, sample.apart)

    def _turn(self, spelt: Spelt, asked: list[int], question: Question) -> Turn:
        prefix = question.prefix.lstrip() if self.is_chat else question.prefix
        begun = self._text(prefix)
        return Turn(
            [*asked, *begun],
            self._continued(prefix, begun, question.answer),
            self._continued(prefix, begun, question.rival) if question.rival else [],
            spelt.spans(question.places),
        )

    def _asked(self, message: str) -> list[int]:
        if self._template is not None:
            return self._template.first_turn(message)
        return [*bos_tokens(self._llm), *self._text(message)]

    def _asked_next(self, message: str) -> list[int]:
        if self._template is not None:
            return self._template.next_turn(message.lstrip())
        return self._text("\n" + message)

    def _continued(self, before: str, tokens: list[int], text: str) -> list[int]:
        """Tokens of a text that goes on after another one."""
        joined = self._text(before + text)
        return joined[len(tokens) :] if joined[: len(tokens)] == tokens else self._text(text)

    def _text(self, text: str) -> list[int]:
        return plain_tokens(self._llm, text)


def _n_common(tokens: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two texts have in common."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(other)))


class Spelt:
    """Tokens and the text that they spell."""

    def __init__(self, llm: Llama, tokens: Sequence[int]) -> None:
        parts = detokenizer(llm, [], starts_text=False)
        texts = [parts.feed(token) for token in tokens]
        self._text = b"".join(texts)
        # Where the bytes of each token end.
        self._ends = list(accumulate(map(len, texts)))

    def spans(self, pieces: Iterable[str]) -> list[tuple[int, int]]:
        """[first token, one behind the last] of each piece of the text that is there."""
        found = [(self._text.find(piece.encode()), len(piece.encode())) for piece in pieces]
        return [
            (bisect_right(self._ends, start), bisect_right(self._ends, start + size - 1) + 1)
            for start, size in found
            if start >= 0
        ]


def greedy_answer(llm: Llama, last: int, max_tokens: int) -> str:
    """What the model says after the token `last`, always taking the likeliest token."""
    tokens: list[int] = []
    with closing(Writer(llm, GREEDY).write([last])) as drawn:
        for token in drawn:
            if is_end_token(llm, token):
                break
            tokens.append(token)
            if len(tokens) == max_tokens:
                break
    parts = detokenizer(llm, [last], starts_text=False)
    return detokenize(parts, tokens).decode(errors="replace")
