"""The passages of a story, and where they are after an edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile

from ..writing.finish import FINISH_STOP


@dataclass
class Passage:
    """A passage of a story.

    Attributes:
        start: position of its first token.
        texts: pieces of its text, in order.
        finish: finish reason; None while it is generated.
    """

    start: int
    texts: list[str] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        """The text that `write` has yielded."""
        return "".join(self.texts)


def edited(
    prompt: str, passages: Sequence[Passage], text: str, n_left: int, n_tokens: int
) -> tuple[str, list[Passage]]:
    """Return the prompt and the passages of a text that was edited.

    A passage whose start was replaced becomes a part of the one before. Passages after the edit
    have text, but no tokens: theirs belong to the edited one.

    Args:
        prompt: the prompt, if it is a part of the text; else "", and the first passage stays.
        passages: the passages before the edit.
        text: the new text.
        n_left: number of tokens that stay.
        n_tokens: number of tokens of the new text.
    """
    before = prompt + "".join(passage.text for passage in passages)
    n_same = n_same_characters(before, text)
    n_end = n_same_characters(before[n_same:][::-1], text[n_same:][::-1])
    places = {} if prompt else {0: n_tokens}
    starts = accumulate((len(passage.text) for passage in passages), initial=len(prompt))
    for at, passage in zip(starts, passages, strict=False):
        if at <= n_same:
            places[at] = passage.start if passage.start <= n_left else n_tokens
        elif at >= len(before) - n_end:
            places[at + len(text) - len(before)] = n_tokens
    found = sorted(at for at in places if at < len(text))
    return text[: min([*found, len(text)])], [
        Passage(places[at], [text[at:end]], FINISH_STOP)
        for at, end in pairwise([*found, len(text)])
    ]


def n_same_characters(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
