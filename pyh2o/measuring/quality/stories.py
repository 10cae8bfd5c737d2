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

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ...errors import SettingsError
from ...generation.sampling import Sampling
from ...llama import Llama
from ...sessions.story import Story
from ...text.prompt import prompt_tokens
from .caches import (
    FULL_CACHE,
    CacheSettings,
    Compute,
    EvalCache,
    caches_to_compare,
    check_caches,
    check_full,
    open_for_tokens,
    open_llama,
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
from .progress import Progress
from .reading import predictions
from .results import ResultFile

REPEATED_NGRAM = 4


@dataclass(frozen=True)
class StorySettings:
    """What the user asks for.

    Attributes:
        model: a GGUF file.
        compute: what computes.
        prompt: what every story goes on after.
        tokens: of a story.
        samples: stories of each cache.
        sampling: how tokens are drawn; story i has its seed plus i.
        caches: what is compared; fractions refer to the prompt and the story.
    """

    model: Path
    compute: Compute
    prompt: str
    tokens: int
    samples: int
    sampling: Sampling
    caches: CacheSettings


@dataclass(frozen=True)
class StoryUnit:
    """One story.

    Attributes:
        cache, sample: which.
        policy, budget, rows: of the cache.
        capacity: rows that it has at most, just before a compaction; 0 without a limit.
        text: without the prompt.
        tokens: written.
        finish: why it ended.
        loops: that the guard broke.
        distinct_1, distinct_2, distinct_3: over its words.
        repeated_4: share of 4-grams of its tokens that had been there before.
        nll: mean loss of its tokens under the full cache, in nats.
        compactions: while it was written.
        seconds: it took to write and to score.
    """

    cache: str
    sample: int
    policy: str
    budget: str
    rows: int
    capacity: int
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
    seconds: float


@dataclass(frozen=True)
class StorySummary:
    """All stories of a cache.

    Attributes:
        cache, policy, budget, rows, capacity: see StoryUnit.
        samples: stories.
        self_bleu: mean BLEU of each story against the others; None for a single one.
        distinct_1, distinct_2, distinct_3, repeated_4: means of those of the stories.
        loops: in all stories.
        perplexity: of all their tokens under the full cache, each story counting as much.
        nll, nll_error: mean loss of the stories, and its standard error.
    """

    cache: str
    policy: str
    budget: str
    rows: int
    capacity: int
    samples: int
    self_bleu: float | None
    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    repeated_4: float | None
    loops: int
    perplexity: float
    nll: float
    nll_error: float | None


class Stories:
    """Writes and scores all stories.

    Attributes:
        notes: what to know when reading the figures.
    """

    def __init__(self, settings: StorySettings, file: ResultFile, progress: Progress) -> None:
        """Look at the model; nothing is measured yet.

        Args:
            settings: what is asked for.
            file: where the results go.
            progress: told what goes on.

        Raises:
            PyH2OError: the model is refused, or a budget makes no sense.
        """
        self._settings = settings
        self._file = file
        self._progress = progress
        with open_for_tokens(settings.model) as llm:
            self._prompt = prompt_tokens(llm, settings.prompt, None, None)
            self._trained = llm._model.n_ctx_train()
        if not self._prompt:
            raise SettingsError("the prompt has no tokens: give --prompt some words")
        self._total = len(self._prompt) + settings.tokens
        self._caches = caches_to_compare(settings.caches, self._total)
        check_caches(self._caches, self._total, self._trained)
        self.notes: tuple[str, ...] = ()
        if self._total > self._trained:
            self._caches = [cache for cache in self._caches if not cache.is_full]
            self.notes = (
                f"the stories are longer than the {self._trained} tokens the model was trained on: "
                "the full cache cannot write them, and scores them in overlapping windows",
            )

    def run(self) -> None:
        """Measure what the file has not.

        Raises:
            PyH2OError: a cache is refused, or there is too little memory.
        """
        missing = [one for one in self._wanted() if _name(*one) not in self._file.units]
        if not missing:
            return
        self._progress.plan(2 * self._settings.tokens * len(missing))
        window = min(self._total, self._trained)
        compute = self._settings.compute
        model = self._settings.model
        with open_llama(model, FULL_CACHE, window=window, compute=compute) as scorer:
            for cache in dict.fromkeys(cache for cache, _ in missing):
                with open_llama(model, cache, window=self._total, compute=compute) as writer:
                    for one in missing:
                        if one[0] == cache:
                            self._file.add(_name(*one), asdict(self._story(writer, scorer, *one)))

    def summaries(self) -> list[StorySummary]:
        """The figures of all that has been measured, in the order in which it was asked for."""
        units: dict[str, list[StoryUnit]] = {}
        for one in self._wanted():
            if (data := self._file.units.get(_name(*one))) is not None:
                unit = StoryUnit(**data)
                units.setdefault(unit.cache, []).append(unit)
        return [_summary(some) for some in units.values()]

    def _wanted(self) -> list[tuple[EvalCache, int]]:
        return [
            (cache, sample) for cache in self._caches for sample in range(self._settings.samples)
        ]

    def _story(self, writer: Llama, scorer: Llama, cache: EvalCache, index: int) -> StoryUnit:
        started = time.perf_counter()
        compactions = writer.kv.compactions
        settings = self._settings
        label = f"story {index + 1}, {cache.name}"
        sampling = replace(settings.sampling, seed=settings.sampling.seed + index)
        story = Story(writer, self._prompt, sampling=sampling, ignore_eos=True)
        for _ in story.write(settings.tokens):
            self._progress.advance(label, 1)
        if cache.is_full:
            check_full(writer)
        text = story.text()
        words = words_of(text)
        written = story.tokens[story.n_prompt :]
        nll = story_surprises(scorer, story.tokens, story.n_prompt, self._trained)
        # A story that is given up for its loops is shorter.
        self._progress.advance(label, 2 * settings.tokens - story.written)
        return StoryUnit(
            cache=cache.name,
            sample=index,
            policy=cache.policy,
            budget=cache.budget,
            rows=cache.rows,
            capacity=0 if cache.is_full else writer.kv.capacity,
            text=text,
            tokens=story.written,
            finish=story.finish,
            loops=story.loops,
            distinct_1=distinct(words, 1),
            distinct_2=distinct(words, 2),
            distinct_3=distinct(words, 3),
            repeated_4=repeated(written, REPEATED_NGRAM),
            nll=float(nll.mean(dtype=np.float64)),
            compactions=writer.kv.compactions - compactions,
            seconds=round(time.perf_counter() - started, 3),
        )


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
    first = units[0]
    losses = np.array([unit.nll for unit in units])
    nll, error = mean_and_error(losses)
    return StorySummary(
        cache=first.cache,
        policy=first.policy,
        budget=first.budget,
        rows=first.rows,
        capacity=first.capacity,
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


def _name(cache: EvalCache, sample: int) -> str:
    return f"{cache.name}/{sample}"
