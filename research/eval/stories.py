"""The quality of generated stories without a judge: how repetitive and how likely they are.

Stories are generated with fixed seeds at the sampling that `pyh2o generate` has by default, the
guard against loops included, and may not end before their length. Then: self-BLEU (how alike the
stories of one cache are), distinct-1/2/3 and repeated 4-grams (how repetitive each of them is), and
the perplexity of each story under the full cache. A low perplexity alone says little: loops have
the lowest of all.

Beyond the context that the model was trained on, a story is scored in windows of that context, each
of which begins half a window after the one before and scores the tokens that this one has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pyh2o.errors import SettingsError
from pyh2o.generation.sampling import Sampling
from pyh2o.llama import Llama
from pyh2o.sessions.story import Story
from pyh2o.text.prompt import prompt_tokens

from .caches import FULL_CACHE, check_budgets, check_full
from .measurement import (
    Job,
    Measurement,
    OfCache,
    Progress,
    QualitySettings,
    Unit,
    grouped,
    told_of,
)
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
from .pictures import draw_bars, figure_bytes, new_figure
from .reading import predictions
from .results import ResultFile
from .tables import TextTable, column, samples, table_of

REPEATED_NGRAM = 4


@dataclass(frozen=True, kw_only=True)
class StorySettings(QualitySettings):
    """What the user asks for; fractions refer to the prompt and the story.

    Attributes:
        prompt: what every story goes on after.
        tokens: of a story.
        samples: stories of each cache.
        sampling: how tokens are drawn; story i has its seed plus i.
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


@dataclass(frozen=True, kw_only=True)
class StoryUnit(Unit):
    """One story, written and scored.

    Attributes:
        sample: which.
        text: without the prompt.
        tokens: written.
        finish: why it ended.
        loops: that the guard broke.
        distinct_1, distinct_2, distinct_3: over its words.
        repeated_4: share of 4-grams of its tokens that had been there before.
        nll: mean loss of its tokens under the full cache, in nats.
        compactions: while it was written.
    """

    sample: int
    text: str
    tokens: int
    finish: str | None
    loops: int
    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    repeated_4: float | None
    nll: float
    compactions: int


@dataclass(frozen=True, kw_only=True)
class StorySummary(OfCache):
    """All stories of a cache.

    Attributes:
        samples: stories.
        self_bleu: mean BLEU of each story against the others; None for a single one.
        distinct_1, distinct_2, distinct_3, repeated_4: means of those of the stories.
        loops: in all stories.
        perplexity: of all their tokens under the full cache, each story counting as much.
        nll, nll_error: mean loss of the stories, and its standard error.
    """

    samples: int
    self_bleu: float | None = field(metadata=column("self-BLEU", ".3f"))
    distinct_1: float | None = field(metadata=column("distinct-1", ".3f"))
    distinct_2: float | None = field(metadata=column("distinct-2", ".3f"))
    distinct_3: float | None = field(metadata=column("distinct-3", ".3f"))
    repeated_4: float | None = field(metadata=column("repeated 4-grams", ".1%"))
    loops: int = field(metadata=column("loops"))
    perplexity: float = field(metadata=column("perplexity", ".2f"))
    nll: float = field(metadata=column("NLL", "±"))
    nll_error: float | None


@dataclass(frozen=True)
class StoryJob(Job):
    """A story that is written with a cache."""

    sample: int

    @property
    def name(self) -> str:
        return f"{self.cache.name}/{self.sample}"


class Stories(Measurement[StorySettings, StoryJob, StoryUnit, StorySummary]):
    """Writes and scores all stories."""

    kind = "story"
    unit = StoryUnit
    _scorer: Llama

    def __init__(self, settings: StorySettings, file: ResultFile, progress: Progress) -> None:
        super().__init__(settings, file, progress)
        with open_for_tokens(settings.model) as llm:
            self._prompt = prompt_tokens(llm, settings.prompt, None, None)
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

    def wanted(self) -> list[StoryJob]:
        samples = range(self._settings.samples)
        return [StoryJob(cache, sample) for cache in self._caches for sample in samples]

    def work(self, job: StoryJob) -> int:
        # It is written, and then scored.
        return 2 * self._settings.tokens

    def opened(self, job: StoryJob) -> Llama:
        return self._open(job.cache, self._total)

    def run(self) -> None:
        if all(map(self._is_measured, self.wanted())):
            return
        with self._open(FULL_CACHE, min(self._total, self._trained)) as self._scorer:
            super().run()

    def measured(self, llm: Llama, job: StoryJob) -> StoryUnit:
        settings = self._settings
        label = f"story {job.sample + 1}, {job.cache.name}"
        sampling = replace(settings.sampling, seed=settings.sampling.seed + job.sample)
        story = Story(llm, self._prompt, sampling=sampling, ignore_eos=True)
        for _ in story.write(settings.tokens):
            self._progress.advance(label, 1)
        if job.cache.is_full:
            check_full(llm)
        text = story.text()
        words = words_of(text)
        written = story.tokens[story.n_prompt :]
        nll = story_surprises(self._scorer, story.tokens, story.n_prompt, self._trained)
        # A story that is given up for its loops is shorter.
        self._progress.advance(label, self.work(job) - story.written)
        return StoryUnit(
            **told_of(job.cache, llm),
            sample=job.sample,
            text=text,
            tokens=story.written,
            finish=story.finish,
            loops=story.loops,
            distinct_1=distinct(words, 1),
            distinct_2=distinct(words, 2),
            distinct_3=distinct(words, 3),
            repeated_4=repeated(written, REPEATED_NGRAM),
            nll=float(nll.mean(dtype=np.float64)),
            compactions=llm.kv.compactions,
        )

    def summaries(self) -> list[StorySummary]:
        return [_summary(some) for some in grouped(self._units(), lambda one: one.cache).values()]

    def tables(self, summaries: Sequence[StorySummary]) -> list[TextTable]:
        """One table, or none if nothing was measured."""
        if not summaries:
            return []
        n = samples(max(one.samples for one in summaries), "story", "stories")
        return [table_of(f"{n} of {self._settings.tokens:,} tokens", summaries)]

    def picture(self, summaries: Sequence[StorySummary], file_format: str) -> bytes:
        """Perplexity under the full cache, and repetition, of each cache's stories."""
        figure = new_figure(13, 6)
        likelihood, repetition = figure.subplots(1, 2)
        names = [one.cache for one in summaries]
        perplexities = [one.perplexity for one in summaries]
        draw_bars(likelihood, names, perplexities, "perplexity under the full cache")
        repeats = [100 * (one.repeated_4 or 0.0) for one in summaries]
        draw_bars(repetition, names, repeats, "repeated 4-grams, %")
        return figure_bytes(figure, file_format)


def story_surprises(llm: Llama, tokens: list[int], n_prompt: int, window: int) -> FloatArray:
    """Loss of every token of a story under the full cache.

    Args:
        llm: with the full cache; its text is dropped.
        tokens: prompt and story.
        n_prompt: tokens of the prompt, at least one.
        window: most tokens that are read at once. The next window begins so that it has half of
            them in common with the one before.

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


def _summary(units: list[StoryUnit]) -> StorySummary:
    losses = np.array([unit.nll for unit in units])
    nll, error = mean_and_error(losses)
    return StorySummary(
        **units[0].of_cache(),
        samples=len(units),
        self_bleu=self_bleu([words_of(unit.text) for unit in units]),
        distinct_1=_mean([unit.distinct_1 for unit in units]),
        distinct_2=_mean([unit.distinct_2 for unit in units]),
        distinct_3=_mean([unit.distinct_3 for unit in units]),
        repeated_4=_mean([unit.repeated_4 for unit in units]),
        loops=sum(unit.loops for unit in units),
        perplexity=perplexity(losses),
        nll=nll,
        nll_error=error,
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
