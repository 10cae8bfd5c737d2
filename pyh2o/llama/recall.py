"""Reading a prompt or a turn so that what its end asks for comes back from the archive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SettingsError

if TYPE_CHECKING:
    from .reading import ReadingLlama

# Tokens at the end of a prompt or a turn that are read a second time, with what they asked for: a
# question, and what a chat template puts behind it.
TAIL = 32

# Tokens that ask for a text that goes on: what comes next has to do with the newest of them. A
# question is asked by all of its tail, or what it asks for first would be missed.
GOING_ON = 16


@dataclass(frozen=True)
class RecalledSpan:
    """A passage that was evicted and is back in the cache.

    Attributes:
        start, end: its positions, end not included. Not every head has all of their rows: each has
            those that it did not hold.
        text: its text.
        weight: how much the question looks at it: the squared shares of the attention of all query
            heads, added up over its parts.
    """

    start: int
    end: int
    text: str
    weight: float


def n_tail(llm: ReadingLlama, n_tokens: int) -> int:
    """How many of so many tokens are read a second time."""
    return min(TAIL, n_tokens, llm.kv.recent - 1)


def read(
    llm: ReadingLlama, tokens: Sequence[int], before_end: Callable[[], None] | None = None
) -> None:
    """Evaluate the tokens of a prompt or a turn, and recall what the last of them ask for.

    The tail is read once for its queries, taken back, and read again when the rows are there. They
    stay until the next prompt is read.

    Args:
        llm: the model.
        tokens: to read, at least two.
        before_end: called before the tail is read, if anything stands before it.
    """
    llm._drop_recalled()
    n_head = len(tokens) - n_tail(llm, len(tokens))
    head, tail = tokens[:n_head], tokens[n_head:]
    with llm._cache.making_room(len(tokens)):
        llm.eval_part(head, 0, len(tokens))
        llm._cache.mark()
        if before_end is not None and head:
            before_end()
        llm._holds_recalled = True
        start = llm.n_tokens
        llm.eval_part(tail, 0, 0)
    if llm._recall_behind(start, _asking(tail)) and llm.remove_tail(start):
        llm.eval_part(tail, len(head), len(tokens))
    elif tail:
        llm._read(len(tail), len(tokens), len(tokens))


def _asking(question: Sequence[int]) -> int:
    """Tokens that ask; a short question needs some of what stands before it."""
    return min(TAIL, max(GOING_ON, len(question)))


def recall_for(llm: ReadingLlama, question: Sequence[int]) -> None:
    """Recall what a question asks for that does not become a part of the text.

    Args:
        llm: the model.
        question: its tokens; none for the end of the text itself.

    Raises:
        SettingsError: it is too long to be taken back.
    """
    n_recent = llm.kv.recent
    if len(question) >= n_recent:
        raise SettingsError(
            f"a question of {len(question)} tokens cannot be taken back: give at most "
            f"{n_recent - 1}, or raise recent (--recent)"
        )
    llm._holds_recalled = True
    start = llm.n_tokens
    if not question:
        llm._recall_behind(start, TAIL)
        return
    llm._drop_recalled()
    llm._cache.mark()
    try:
        llm.eval_part(question, 0, 0)
        llm._recall_behind(start, _asking(question))
    finally:
        llm.remove_tail(start)


def spans(llm: ReadingLlama) -> list[RecalledSpan]:
    """What is recalled now, in the order of the text."""
    found: list[RecalledSpan] = []
    for start, end, weight in llm._cache.recalled():
        tokens: list[int] = llm.input_ids[start:end].tolist()
        text = llm.detokenize(tokens, special=True).decode("utf-8", errors="replace")
        found.append(RecalledSpan(start, end, text, weight))
    return found
