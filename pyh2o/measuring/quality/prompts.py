"""Samples as a model is asked them: their tokens, and what it answers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from ...generation.writer import Writer
from ...llama import Llama
from ...text.chat_template import ChatTemplate
from ...text.detokenizer import detokenize, detokenizer
from ...text.vocabulary import is_end_token
from ..model import bos_tokens, plain_tokens
from .reading import GREEDY
from .samples import Sample

# Stands for a question that is not known yet.
_OTHER_QUESTION = "\n?"


@dataclass(frozen=True)
class Prompt:
    """The tokens of a sample.

    Attributes:
        context: what can be read before the question is known.
        rest: the question and the beginning of the answer.
        answer: the right one.
    """

    context: list[int]
    rest: list[int]
    answer: list[int]


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
        tokens = self._asked(sample.context + sample.question)
        # The same for every question.
        other = self._asked(sample.context + _OTHER_QUESTION)
        pairs = enumerate(zip(tokens, other, strict=False))
        n_context = next((i for i, (a, b) in pairs if a != b), len(other))
        prefix = sample.prefix.lstrip() if self.is_chat else sample.prefix
        begun = self._text(prefix)
        return Prompt(
            tokens[:n_context],
            [*tokens[n_context:], *begun],
            self._continued(prefix, begun, sample.answer),
        )

    def _asked(self, message: str) -> list[int]:
        if self._template is not None:
            return self._template.first_turn(message)
        return [*bos_tokens(self._llm), *self._text(message)]

    def _continued(self, before: str, tokens: list[int], text: str) -> list[int]:
        """Tokens of a text that goes on after another one."""
        joined = self._text(before + text)
        return joined[len(tokens) :] if joined[: len(tokens)] == tokens else self._text(text)

    def _text(self, text: str) -> list[int]:
        return plain_tokens(self._llm, text)


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
