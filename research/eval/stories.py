"""Quality of generated stories without a judge: how repetitive and how likely they are.

Stories are generated with fixed seeds and the default sampling of `pyh2o generate`, including loop
detection, and cannot end before their length. Reported are self-BLEU (similarity of a cache's
stories), distinct-1/2/3 and repeated 4-grams (repetition in each story), and the perplexity of each
story under the full cache. A low perplexity alone says little: loops have the lowest of all.

Beyond the trained context, a story is scored in windows of that size, each of which starts half a
window after the previous one and scores the tokens that the previous one lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyh2o.compat.llama import Llama
from pyh2o.errors import SettingsError
from pyh2o.sessions.story import Story
from pyh2o.writing.prompt import prompt_tokens
from pyh2o.writing.sampling import Sampling

from .caches import FULL_CACHE, check_budgets, check_full
from .measurement import OF_CACHE, Job, Measurement, Settings, count_of, grouped, mean_of
from .metrics import (
    FloatArray,
    distinct,
    mean_and_error,
    perplexity,
    repeated,
    self_bleu,
    surprises,
    words_of,
)
from .model import open_for_tokens, trained_context
from .reading import predictions
from .results import ResultFile, Unit
from .tables import TextTable, column, table_of

REPEATED_NGRAM = 4


@dataclass(frozen=True, kw_only=True)
class StorySettings(Settings):
    """Requested stories; fractions refer to the prompt and the story.

    Attributes:
        prompt: the start of every story.
        tokens: of a story.
        samples: stories of each cache.
        sampling: sampling settings; story i has its seed plus i.
    """

    prompt: str
    tokens: int
    samples: int
    sampling: Sampling

    def options(self) -> dict[str, Any]:
        return {
            "seed": self.sampling.seed,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "temp": self.sampling.temperature,
        }


class Stories(Measurement[StorySettings]):
    """Generates and scores all stories; a job's `what` is the number of its story."""

    kind = "story"
    _scorer: Llama

    def __init__(self, settings: StorySettings, file: ResultFile) -> None:
        super().__init__(settings, file)
        with open_for_tokens(settings.model) as llm:
            self._prompt = prompt_tokens(llm.text.model, settings.prompt)
            self._trained = trained_context(llm)
        if not self._prompt:
            raise SettingsError("the prompt has no tokens: give --prompt some words")
        self._total = len(self._prompt) + settings.tokens
        self._caches = settings.caches.for_text(self._total)
        check_budgets(self._caches, self._total, self._trained)
        if self._total > self._trained:
            self._caches = [cache for cache in self._caches if not cache.is_full]
            self.notes = (
                f"the stories are longer than the {self._trained} tokens the model was trained on: "
                "the full cache cannot write them, and scores them in overlapping windows",
            )

    def wanted(self) -> list[Job]:
        return [
            Job(cache, f"{cache.name}/{sample}", sample, opening=cache)
            for cache in self._caches
            for sample in range(self._settings.samples)
        ]

    def opened(self, job: Job) -> Llama:
        return self._open(job.cache, self._total)

    def run(self) -> None:
        if self._missing():
            with self._open(FULL_CACHE, min(self._total, self._trained)) as self._scorer:
                super().run()

    def measured(self, llm: Llama, job: Job) -> Unit:
        """Distinct-n are over words, the share of repeated 4-grams is over tokens."""
        sampling = self._settings.sampling
        sampling = replace(sampling, seed=sampling.seed + job.what)
        story = Story(llm, self._prompt, sampling=sampling, ignore_eos=True)
        for _ in story.write(self._settings.tokens):
            pass
        text = story.text()
        words = words_of(text)
        nll = story_surprises(self._scorer, story.tokens, story.n_prompt, self._trained)
        return {
            "sample": job.what,
            "text": text,
            "tokens": story.written,
            "finish": story.finish,
            "loops": story.loops,
            **{f"distinct_{n}": distinct(words, n) for n in (1, 2, 3)},
            "repeated_4": repeated(story.tokens[story.n_prompt :], REPEATED_NGRAM),
            "nll": float(nll.mean(dtype=np.float64)),
            "compactions": llm.kv.compactions,
        }

    def tables(self) -> list[TextTable]:
        caches = grouped(self._units(), lambda unit: unit["cache"])
        if not caches:
            return []
        n = count_of(max(map(len, caches.values())), "story", "stories")
        title = f"{n} of {self._settings.tokens:,} tokens"
        return [table_of(title, [summed_up(units) for units in caches.values()], FIGURES)]


def story_surprises(llm: Llama, tokens: list[int], n_prompt: int, window: int) -> FloatArray:
    """Return the loss of every token of a story under the full cache.

    Args:
        llm: with the full cache; its text is dropped.
        tokens: prompt and story.
        n_prompt: tokens of the prompt, at least one.
        window: maximum tokens per window. The next window overlaps half of the previous one.

    Returns:
        [len(tokens) - n_prompt].
    """
    parts = []
    scored = n_prompt
    start = 0
    while scored < len(tokens):
        end = min(start + window, len(tokens))
        llm.reset()
        for first, log_probs in predictions(llm, tokens[start : end - 1]):
            following = start + first + 1
            skip = max(0, scored - following)
            if skip < len(log_probs):
                expected = tokens[following + skip : following + len(log_probs)]
                parts.append(surprises(log_probs[skip:], expected))
        check_full(llm)
        scored = max(scored, end)
        start = end - window // 2
    return np.concatenate(parts)


FIGURES = [
    *OF_CACHE,
    column("self-BLEU", "self_bleu", ".3f"),
    column("distinct-1", "distinct_1", ".3f"),
    column("distinct-2", "distinct_2", ".3f"),
    column("distinct-3", "distinct_3", ".3f"),
    column("repeated 4-grams", "repeated_4", ".1%"),
    column("loops", "loops"),
    column("perplexity", "perplexity", ".2f"),
    column("NLL", "nll", ".4f±"),
]


def summed_up(units: Sequence[Unit]) -> dict[str, Any]:
    """Return a cache's figures: means over its stories, all loops, and the perplexity of all
    tokens.
    """
    losses = np.array([unit["nll"] for unit in units])
    nll, error = mean_and_error(losses)
    means = ("distinct_1", "distinct_2", "distinct_3", "repeated_4")
    return {
        **units[0],
        "self_bleu": self_bleu([words_of(unit["text"]) for unit in units]),
        **{name: mean_of(unit[name] for unit in units) for name in means},
        "loops": sum(unit["loops"] for unit in units),
        "perplexity": perplexity(losses),
        "nll": nll,
        "nll_error": error,
    }
