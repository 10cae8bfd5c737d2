"""Recall: RULER's synthetic tasks through caches that evict.

A task can be asked in two ways. With the question "after", the context streams through the cache as
a conversation would, and what will be asked is not known when rows are evicted. With the question
"before", context and question are read in full, the cache is compacted once, and the answer follows
(as H2O's authors and kvpress with `query_aware` do it). The full cache knows no difference.

A weak model fails most tasks with any cache: the likelihood of the right answer is measured, too.

Differences from RULER, besides those of the tasks: the answer's prefix ends without a space, which
the tokens of most models begin words with; where there is a chat template, the prefix comes behind
the assistant's header, also without the space before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...errors import SettingsError
from ...llama import Llama
from ..caches import FULL, MeasuredCache, check_budgets
from ..measurement import (
    Job,
    Measurement,
    OfCache,
    Progress,
    QualitySettings,
    Unit,
    grouped,
    told_of,
)
from ..model import NamedText, open_for_tokens, trained_context
from ..pictures import draw_lines, figure_bytes, new_figure
from ..results import ResultFile
from ..tables import TextTable, column, samples, table_of
from .metrics import difference
from .prompts import Prompt, Prompter, greedy_answer
from .reading import answer_surprises
from .samples import Sample, string_match_all
from .tasks import Task, task_named
from .words import Prose

Question = Literal["before", "after"]

# What stands for several tasks together.
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class RecallSettings(QualitySettings):
    """What the user asks for.

    Attributes:
        tasks: names of RULER's tasks.
        tokens: lengths of a sample, with its answer.
        samples: of each task and length.
        questions: when the question is known.
        prose: text to hide things in; None for sentences that are made up.
        seed: of the samples.
    """

    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    samples: int
    questions: tuple[Question, ...]
    prose: NamedText | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        return {"seed": self.seed, "text": "" if self.prose is None else self.prose.digest[:12]}

    def record(self) -> dict[str, Any]:
        record = super().record()
        del record["prose"]
        return record


@dataclass(frozen=True, kw_only=True)
class RecallUnit(Unit):
    """One answer.

    Attributes:
        task, tokens, question, sample: which; the question of the full cache is "".
        prompt_tokens: of the prompt, with the beginning of the answer.
        references: what the answer should have in it.
        answer: that was generated.
        score: share of the references in it.
        nll: mean loss of the tokens of the right answer, in nats.
    """

    task: str
    tokens: int
    question: str
    sample: int
    prompt_tokens: int
    references: list[str]
    answer: str
    score: float
    nll: float


@dataclass(frozen=True, kw_only=True)
class RecallSummary(OfCache):
    """One cache in one task; the task "all" is the mean over all tasks.

    Attributes:
        task, tokens, question: see RecallUnit.
        samples: answers.
        score: mean of their scores, in percent.
        score_of_full: what share of the full cache's score that is; None where that is 0.
        nll: mean loss of the right answers' tokens.
        nll_to_full, nll_to_full_error: mean difference to the full cache's, sample by sample, and
            its standard error; None where there is none.
    """

    task: str
    tokens: int
    question: str = field(metadata=column("question"))
    samples: int
    score: float = field(metadata=column("score", ".1f"))
    score_of_full: float | None = field(metadata=column("of full", ".0%"))
    nll: float = field(metadata=column("NLL of the answer", ".3f"))
    nll_to_full: float | None = field(metadata=column("NLL - full", "+±"))
    nll_to_full_error: float | None


@dataclass(frozen=True)
class RecallJob(Job):
    """A sample that is asked through a cache."""

    task: Task
    tokens: int
    question: str
    sample: int

    @property
    def name(self) -> str:
        question = self.question or "any"
        return f"{self.task.name}/{self.tokens}/{question}/{self.cache.name}/{self.sample}"

    @property
    def opening(self) -> Hashable:
        return self.tokens, self.question, self.cache


class Recall(Measurement[RecallSettings, RecallJob, RecallUnit, RecallSummary]):
    """Asks every cache all questions."""

    kind = "recall"
    unit = RecallUnit

    def __init__(self, settings: RecallSettings, file: ResultFile, progress: Progress) -> None:
        super().__init__(settings, file, progress)
        self._tasks = [task_named(name) for name in settings.tasks]
        self._caches = {tokens: settings.caches.for_text(tokens) for tokens in settings.tokens}
        with open_for_tokens(settings.model) as llm:
            self._check_lengths(trained_context(llm))
            prompter = Prompter(llm)
            self._samples = self._make_samples(prompter)
        if settings.prose is None and any(task.needs_prose for task in self._tasks):
            self.notes += (
                "the prose is made up of simple sentences, since no --text was given: it is easier "
                "to find something in than RULER's essays",
            )
        if not prompter.is_chat:
            self.notes += ("the model has no chat template: it goes on with the plain text",)

    def _check_lengths(self, trained: int) -> None:
        for tokens in self._settings.tokens:
            if tokens > trained:
                raise SettingsError(
                    f"--tokens {tokens} is more than the {trained} the model was trained on, so no "
                    "full cache can answer: give fewer"
                )
            check_budgets(self._caches[tokens], tokens, trained)

    def _make_samples(
        self, prompter: Prompter
    ) -> dict[tuple[str, int, int], tuple[Sample, Prompt]]:
        """Every sample with its tokens, by task, length and number."""
        settings = self._settings
        prose = Prose(None if settings.prose is None else settings.prose.text, settings.seed)
        made: dict[tuple[str, int, int], tuple[Sample, Prompt]] = {}
        total = len(self._tasks) * len(settings.tokens) * settings.samples
        for task in self._tasks:
            for tokens in settings.tokens:

                def fits(sample: Sample, task: Task = task, tokens: int = tokens) -> bool:
                    prompt = prompter.prompt(sample)
                    size = len(prompt.context) + len(prompt.rest)
                    return size + max(task.answer_tokens, len(prompt.answer)) <= tokens

                for index in range(settings.samples):
                    sample = task.sample(index, tokens, settings.seed, prose, fits)
                    made[task.name, tokens, index] = sample, prompter.prompt(sample)
                    self._progress.extra("making the samples", len(made), total)
        return made

    def wanted(self) -> list[RecallJob]:
        questions: Sequence[str] = self._settings.questions
        return [
            RecallJob(cache, task, tokens, question, sample)
            for task in self._tasks
            for tokens in self._settings.tokens
            for cache in self._caches[tokens]
            for question in ([""] if cache.is_full else questions)
            for sample in range(self._settings.samples)
        ]

    def work(self, job: RecallJob) -> int:
        return job.tokens

    def opened(self, job: RecallJob) -> Llama:
        prefill: dict[str, Any] = {"prefill": "exact"} if job.question == "before" else {}
        return self._open(job.cache, job.tokens, **prefill)

    def measured(self, llm: Llama, job: RecallJob) -> RecallUnit:
        sample, prompt = self._samples[job.task.name, job.tokens, job.sample]
        llm.reset()
        if job.question == "before":
            llm.eval([*prompt.context, *prompt.rest[:-1]])
        else:
            llm.eval(prompt.context)
            if len(prompt.rest) > 1:
                llm.eval(prompt.rest[:-1])
        last = prompt.rest[-1]
        losses = answer_surprises(llm, last, prompt.answer)
        answer = greedy_answer(llm, last, job.task.answer_tokens)
        self._progress.advance(f"{job.task.name}, {_title(job.question, job.cache)}", job.tokens)
        return RecallUnit(
            **told_of(job.cache, llm),
            task=job.task.name,
            tokens=job.tokens,
            question=job.question,
            sample=job.sample,
            prompt_tokens=len(prompt.context) + len(prompt.rest),
            references=list(sample.references),
            answer=answer,
            score=string_match_all(answer, sample.references),
            nll=float(losses.mean(dtype=np.float64)),
        )

    def summaries(self) -> list[RecallSummary]:
        found = self._units()
        units = grouped(found, lambda unit: (unit.task, unit.tokens, unit.question, unit.cache))
        if len(self._tasks) > 1:
            units |= grouped(found, lambda unit: (ALL, unit.tokens, unit.question, unit.cache))
        order = [*self._settings.tasks, ALL]
        return [
            _summary(key[0], units[key], units.get((key[0], key[1], "", FULL)))
            for key in sorted(units, key=lambda key: (key[1], order.index(key[0])))
        ]

    def tables(self, summaries: Sequence[RecallSummary]) -> list[TextTable]:
        """A table for each task and length."""
        tables = []
        for (task, tokens), own in grouped(summaries, lambda one: (one.task, one.tokens)).items():
            name = "all tasks" if task == ALL else task
            n = samples(max(one.samples for one in own), "sample", "samples")
            tables.append(table_of(f"{name}, {tokens:,} tokens, {n}", own))
        return tables

    def picture(self, summaries: Sequence[RecallSummary], file_format: str) -> bytes:
        """Scores and losses by budget: those of all tasks together where there are several."""
        own = [one for one in summaries if one.task == ALL or len(self._tasks) == 1]
        figure = new_figure(13, 6)
        scores, losses = figure.subplots(1, 2)
        lines = grouped([one for one in own if one.rows], _line)
        for axis, name in ((scores, "score"), (losses, "nll")):
            for one in own:
                if not one.rows:
                    label = f"full, {one.tokens:,}"
                    axis.axhline(getattr(one, name), color="k", linestyle="--", label=label)
            draw_lines(
                axis,
                {
                    label: [(one.rows, getattr(one, name)) for one in some]
                    for label, some in lines.items()
                },
            )
        scores.set(xlabel="rows", ylabel="score, %")
        losses.set(xlabel="rows", ylabel="NLL of the right answer, per token")
        return figure_bytes(figure, file_format)


def _summary(task: str, units: list[RecallUnit], full: list[RecallUnit] | None) -> RecallSummary:
    first = units[0]
    losses = np.array([unit.nll for unit in units])
    score = float(np.mean([unit.score for unit in units]))
    of_full = reference = None
    if full is not None and len(full) == len(units):
        score_of_full = float(np.mean([unit.score for unit in full]))
        of_full = score / score_of_full if score_of_full else None
        if first.cache != FULL:
            reference = np.array([unit.nll for unit in full])
    to_full = difference(losses, reference)
    return RecallSummary(
        **first.of_cache(),
        task=task,
        tokens=first.tokens,
        question=first.question,
        samples=len(units),
        score=100 * score,
        score_of_full=of_full,
        nll=float(losses.mean()),
        nll_to_full=to_full[0],
        nll_to_full_error=to_full[1],
    )


def _title(question: str, cache: MeasuredCache) -> str:
    return f"question {question}, {cache.name}" if question else cache.name


def _line(one: RecallSummary) -> str:
    """Caches that differ in their budget only are on one line."""
    return f"{one.policy}, question {one.question}, {one.tokens:,} tokens"
