"""The likelihood of stories under the full cache."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from research.eval.caches import FULL_CACHE, Compute, open_llama
from research.eval.metrics import log_softmax, surprises
from research.eval.stories import story_surprises
from tiny_llama import tiny_llama


@pytest.mark.parametrize(("n", "window"), [(90, 100), (150, 64), (40, 40)])
@pytest.mark.parametrize("n_prompt", [1, 30])
def test_stories_are_scored_in_overlapping_windows(
    path: Path, rng: np.random.Generator, n: int, window: int, n_prompt: int
) -> None:
    tokens = rng.integers(3, 384, n).tolist()
    with open_llama(path, FULL_CACHE, window=window, compute=Compute(threads=1)) as llm:
        losses = story_surprises(llm, tokens, n_prompt, window)
    assert len(losses) == n - n_prompt
    with tiny_llama(path, n_ctx=512, evict=False, logits_all=True) as llm:
        for position in (n_prompt, window - 1, window, n - 1):
            if not n_prompt <= position < n:
                continue
            # the window that scores it, and not one before
            steps = max(0, math.ceil((position + 1 - window) / (window // 2)))
            start = 0 if steps == 0 else steps * (window - window // 2)
            llm.reset()
            llm.eval(tokens[start:position])
            expected = surprises(
                log_softmax(llm.scores[position - start - 1][None]), [tokens[position]]
            )
            assert losses[position - n_prompt] == pytest.approx(expected[0], abs=2e-2)
