"""Shared by the tests of stories: stories generated in one go, or interrupted and saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pyh2o import Llama
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling

PROMPT = "Once upon a time"
LOOPING = Sampling(temperature=0, repeat_penalty=1)


@dataclasses.dataclass
class Result:
    """A finished story: its tokens, its text and why it ended."""

    tokens: list[int]
    text: str
    held_back: str
    finish: str | None
    loops: int


def whole(llm: Llama, count: int, **settings: Any) -> Result:
    """Return a story generated in one go."""
    tale = Story(llm, PROMPT, **settings)
    text = "".join(tale.write(count))
    return result(tale, text)


def result(tale: Story, text: str) -> Result:
    assert tale.text() == text
    return Result(tale.tokens, text, tale.held_back, tale.finish, tale.loops)


def in_pieces(llms: Sequence[Llama], path: Path, lengths: Sequence[int], **settings: Any) -> Result:
    """Return the same story, saved after each of the lengths and loaded by the next model."""
    tale = Story(llms[0], PROMPT, **settings)
    text = ""
    for number, length in enumerate(lengths):
        if number:
            tale = Story.load(path, llms[number % len(llms)])
        text += "".join(tale.write(length))
        tale.save(path)
    return result(tale, text)


def cuts(rng: np.random.Generator, total: int, pieces: int = 5) -> list[int]:
    """Return random parts with the sum `total`."""
    ends = sorted(rng.choice(np.arange(1, total), pieces - 1, replace=False).tolist())
    return [end - begin for begin, end in pairwise([0, *ends, total])]
