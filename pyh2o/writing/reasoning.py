"""Finds the reasoning in the tokens of an answer, which is dropped when the answer has ended.

Templates remove the same span from earlier answers, and clients from the history that they send: it
starts with the mark that opens the reasoning, which may be the end of the prompt, and ends with the
white space after the mark that closes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..core.detokenizer import PieceDetokenizer
from ..core.native_chat import NativeTemplate
from ..errors import ChatError

if TYPE_CHECKING:
    from ..core.model import Model

# In a model's metadata.
TEMPLATE = "tokenizer.chat_template"
# Number of last tokens of a prompt in which reasoning may start.
CALL_TOKENS = 32


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks around the reasoning of a model.

    Attributes:
        opening: mark before the reasoning.
        closings: marks, one of which ends the reasoning.
        call: the generation prompt, if it may be repeated after the reasoning; otherwise "".
    """

    opening: str = "<think>"
    closings: tuple[str, ...] = ("</think>",)
    call: str = ""

    def find(self, text: bytes, answer: int) -> tuple[int, int] | None:
        """Return the start and end of complete reasoning; None if there is none.

        Args:
            text: the end of a prompt, and the answer.
            answer: offset of the answer.
        """
        opening = re.escape(self.opening.encode())
        closing = b"|".join(re.escape(each.encode()) for each in self.closings)
        reasoning = re.compile(
            rb"\s*%b.*?(?:%b)\s*(?:%b)?" % (opening, closing, re.escape(self.call.encode())),
            re.DOTALL,
        )
        # the prompt may open the reasoning, or also close it: then there is none
        call = re.compile(rb"%b\s*(?:(?:%b)\s*)?$" % (opening, closing)).search(text, 0, answer)
        begin = end = call.start() if call else answer
        while found := reasoning.match(text, end):
            end = found.end()
        return (begin, end) if end > begin else None


@lru_cache(maxsize=8)
def marks_of(template: str) -> ReasoningMarks:
    """Return the marks of a chat template; <think> and </think> if it has none."""
    try:
        prompt = NativeTemplate(template).apply([{"role": "user", "content": "?"}])
    except ChatError:
        return ReasoningMarks()
    if not prompt.thinking_start_tag:
        return ReasoningMarks()
    closings = tuple(prompt.thinking_end_tags)
    return ReasoningMarks(prompt.thinking_start_tag, closings, prompt.generation_prompt)


def drops_reasoning(model: Model) -> bool:
    """Return whether the reasoning of finished answers is dropped from the cache."""
    return model.evicting and not model.settings.keep_thoughts


def reasoning_span(
    model: Model, tokens: Sequence[int] | npt.NDArray[np.intc], answer: int, end: int
) -> tuple[int, int] | None:
    """Return the span of an answer's reasoning in a text: (start, end), end not included, or None.

    Args:
        model: the model.
        tokens: tokens of the text.
        answer, end: positions of the start and the end of the answer.
    """
    marks = marks_of(model.metadata.get(TEMPLATE, ""))
    first = max(0, answer - CALL_TOKENS)
    parts = PieceDetokenizer(model.native.vocab, model.token_bos(), starts_text=False, special=True)
    pieces = [parts.piece(int(token)) for token in tokens[first:end]]
    ends = np.cumsum([0, *map(len, pieces)])
    found = marks.find(b"".join(pieces), int(ends[answer - first]))
    if found is None:
        return None
    start = first + int(np.searchsorted(ends, found[0]))
    last = first + int(np.searchsorted(ends, found[1], side="right")) - 1
    return (start, last) if start < last else None
