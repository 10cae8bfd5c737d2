"""Stories of a tiny random model: written, scored, and what they sum up to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measured import TRAINED, results, without_times
from pyh2o import Sampling
from research.eval.caches import FULL_CACHE, Compute, open_llama
from research.eval.measurement import CacheSettings
from research.eval.metrics import log_softmax, surprises
from research.eval.stories import Stories, StorySettings, story_surprises, summed_up
from tiny_llama import tiny_llama


def story_settings(path: Path, **changes: Any) -> StorySettings:
    settings = StorySettings(
        model=path,
        compute=Compute(threads=1),
        prompt="once upon a time",
        tokens=60,
        samples=2,
        sampling=Sampling(seed=3),
        caches=CacheSettings(("h2o",), (30,)),
    )
    return replace(settings, **changes)


def test_stories(path: Path) -> None:
    Stories(story_settings(path), file := results()).run()
    units = file.units
    assert list(units) == ["full/0", "full/1", "h2o, 30 rows/0", "h2o, 30 rows/1"]
    assert {unit["tokens"] for unit in units.values()} == {60}
    # nothing has to be evicted from so little text, so the caches write the same
    assert units["full/1"]["text"] == units["h2o, 30 rows/1"]["text"] != units["full/0"]["text"]
    full, other = (
        summed_up([units[f"{cache}/{i}"] for i in range(2)]) for cache in ("full", "h2o, 30 rows")
    )
    assert full["perplexity"] == pytest.approx(other["perplexity"])
    losses = [units["full/0"]["nll"], units["full/1"]["nll"]]
    assert full["perplexity"] == pytest.approx(math.exp(np.mean(losses)))
    assert full["self_bleu"] is not None


def test_stories_are_the_same_in_every_run(path: Path) -> None:
    files = [results(), results()]
    for file in files:
        Stories(story_settings(path, samples=1), file).run()
    assert without_times(files[0].units) == without_times(files[1].units)
    other = results()
    settings = story_settings(path, samples=1, sampling=Sampling(seed=4))
    Stories(settings, other).run()
    assert without_times(other.units) != without_times(files[0].units)


@pytest.mark.parametrize(("n", "window"), [(90, 100), (150, 64), (131, 65), (40, 40)])
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
            if window % 2 and steps > 1:
                continue
            llm.reset()
            llm.eval(tokens[start:position])
            expected = surprises(
                log_softmax(llm.scores[position - start - 1][None]), [tokens[position]]
            )
            assert losses[position - n_prompt] == pytest.approx(expected[0], abs=2e-2)


def test_stories_beyond_the_trained_context(path: Path) -> None:
    settings = story_settings(path, tokens=TRAINED, samples=1)
    stories = Stories(settings, results())
    assert "the full cache cannot write them" in stories.notes[0]
    stories.run()
    assert [row[0] for row in stories.tables()[0].rows] == ["h2o, 30 rows"]
