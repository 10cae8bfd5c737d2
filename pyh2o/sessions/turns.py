"""The turns of a conversation: who said what, and where in the text it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..generation.finish import FINISH_STOP
from ..text.beginnings import n_common
from ..text.chat_template import ChatTemplate


@dataclass(frozen=True)
class Turn:
    """A message and its answer; positions count the tokens of the text.

    Attributes:
        user: the message.
        answer: the text of the answer.
        finish: why it ended: "stop", "length" (`max_tokens`, or a full cache that does not evict),
            "repetition" (it only repeated itself), "interrupted" or "trained_context".
        start: where the turn's tokens begin: with the end of the answer before.
        answer_start: the answer's first token.
        end: behind the answer's last token, whether that is evaluated yet or not.
        attempt: answers the message had before this one.
    """

    user: str
    answer: str
    finish: str
    start: int
    answer_start: int
    end: int
    attempt: int = 0


def rewritten(
    template: ChatTemplate, text: Sequence[int], turns: Sequence[Turn]
) -> tuple[list[int], tuple[Turn, ...]]:
    """A conversation with another template around the same messages and answers."""
    if not turns:
        return list(template.opening), ()
    tokens: list[int] = []
    moved: list[Turn] = []
    for turn in turns:
        if moved:
            answer = tokens[moved[-1].answer_start :]
            start, new = len(tokens), template.next_turn(turn.user, answer)
        else:
            new = template.first_turn(turn.user)
            start = n_common(new[:-1], template.opening)
        tokens += new
        answer_start = len(tokens)
        tokens += text[turn.answer_start : turn.end]
        moved.append(replace(turn, start=start, answer_start=answer_start, end=len(tokens)))
    return tokens, tuple(moved)


def said_before(
    template: ChatTemplate, said: Sequence[tuple[str, str]]
) -> tuple[list[int], tuple[Turn, ...]]:
    """A conversation of messages and answers that were said elsewhere, as texts."""
    tokens, turns = list(template.opening), list[Turn]()
    for user, answer in said:
        if turns:
            start, new = len(tokens), template.next_turn(user, tokens[turns[-1].answer_start :])
        else:
            new = template.first_turn(user)
            start = n_common(new[:-1], template.opening)
        tokens[start:] = new if turns else new[start:]
        answer_start = len(tokens)
        tokens += template.answer(answer, tokens[-1])
        turns.append(Turn(user, answer, FINISH_STOP, start, answer_start, len(tokens)))
    return tokens, tuple(turns)
