"""Where an answer's thoughts are among its tokens: what a text can do without once it has ended.

That is what templates leave out of earlier answers, and clients of the history that they send: from
the mark that opens thoughts, which a template may write itself to call for an answer, to the white
space behind the one that closes them.
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
# Tokens at the end of a prompt among which thoughts may be opened.
CALL_TOKENS = 32


@dataclass(frozen=True)
class ThoughtMarks:
    """What a model writes around its thoughts.

    Attributes:
        opening: before them.
        closings: behind them, one of these.
        call: what calls for an answer, if that comes again behind thoughts; else empty.
    """

    opening: str = "<think>"
    closings: tuple[str, ...] = ("</think>",)
    call: str = ""

    def find(self, text: bytes, answer: int) -> tuple[int, int] | None:
        """Where the thoughts begin and end; None if there are none, or if they have no end.

        Args:
            text: the end of a prompt, and the answer.
            answer: where that begins.
        """
        opening = re.escape(self.opening.encode())
        closing = b"|".join(re.escape(each.encode()) for each in self.closings)
        thoughts = re.compile(
            rb"\s*%b.*?(?:%b)\s*(?:%b)?" % (opening, closing, re.escape(self.call.encode())),
            re.DOTALL,
        )
        # the call may have opened them, or closed them, too: no thoughts then
        call = re.compile(rb"%b\s*(?:(?:%b)\s*)?$" % (opening, closing)).search(text, 0, answer)
        begin = end = call.start() if call else answer
        while found := thoughts.match(text, end):
            end = found.end()
        return (begin, end) if end > begin else None


@lru_cache(maxsize=8)
def marks_of(template: str) -> ThoughtMarks:
    """The marks of models with this chat template; <think> and </think> where it has none."""
    try:
        prompt = NativeTemplate(template).apply([{"role": "user", "content": "?"}])
    except ChatError:
        return ThoughtMarks()
    if not prompt.thinking_start_tag:
        return ThoughtMarks()
    closings = tuple(prompt.thinking_end_tags)
    return ThoughtMarks(prompt.thinking_start_tag, closings, prompt.generation_prompt)


def forgets_thoughts(model: Model) -> bool:
    """Whether texts of a model do without thoughts that have led to an answer."""
    return model.evicting and not model.settings.keep_thoughts


def thoughts_of(
    model: Model, tokens: Sequence[int] | npt.NDArray[np.intc], answer: int, end: int
) -> tuple[int, int] | None:
    """The span of an answer's thoughts, (start, end) in a text, end not included; None for none.

    Args:
        model: it.
        tokens: of the text.
        answer, end: where the answer begins and ends in them.
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
    behind = first + int(np.searchsorted(ends, found[1], side="right")) - 1
    return (start, behind) if start < behind else None
