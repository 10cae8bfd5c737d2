"""A prompt gets the answer that it would get alone, whatever the model was used for before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from tiny_llama import tiny_llama

N_VOCAB = 384
N_PAIRS = 40
N_ANSWER = 12
# 60 rows and 30 cells of slack: prompts of up to 200 tokens go through several compactions.
CACHE = {"n_ctx": 256, "hh": 30, "recent": 30, "slack": 30, "type_k": 0, "type_v": 0}


MODEL: dict[str, Any] = {"seed": 4}


def answer(llm: Llama, prompt: list[int]) -> list[int]:
    """What is most likely, whatever it means."""
    tokens = zip(range(N_ANSWER), llm.generate(prompt, temp=0.0), strict=False)
    return [token for _, token in tokens]


def next_prompt(rng: np.random.Generator, before: list[int]) -> list[int]:
    """One that begins as the text before, with some of it or all, and goes on otherwise."""
    n_shared = int(rng.choice([rng.integers(0, len(before) + 1), len(before), 0]))
    n_new = int(rng.integers(0 if n_shared else 1, 100))
    return before[:n_shared] + rng.integers(3, N_VOCAB, n_new).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "h2o-far:near=8"},
        {"policy": "h2o-far:near=8", "n_batch": 7},
        {"policy": "h2o-decay"},
        {"policy": "snap:queries=8", "n_batch": 7},
    ],
    ids=str,
)
def test_a_prompt_gets_the_answer_that_it_gets_alone(
    path: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """Where the whole common part was read as a prompt."""
    used = tiny_llama(path, **CACHE, **settings)
    alone = tiny_llama(path, **CACHE, **settings)
    n_reused, before = 0, rng.integers(3, N_VOCAB, 150).tolist()
    for _ in range(N_PAIRS):
        prompt = next_prompt(rng, before)
        read: list[int] = []
        used.text.prompt_progress = lambda _done, n_all, read=read: read.append(n_all)
        mine = answer(used, prompt)
        n_reused += bool(read) and read[-1] < len(prompt)
        alone.reset()
        assert mine == answer(alone, prompt), f"{len(prompt)} tokens"
        before = prompt[:200]
    assert n_reused > 0
