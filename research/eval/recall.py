"""Recall: what stands somewhere in a long text, asked through caches that evict.

A task can be asked in two ways. With the question "after", the context streams through the cache as
a conversation would, and what will be asked is not known when rows are evicted. With the question
"before", context and question are read in full, the cache is compacted once, and the answer follows
(as H2O's authors and kvpress with `query_aware` do it). The full cache knows no difference.

A text may have several questions. Each is asked behind those before it and the right answers to
them, whatever the model has answered.

A weak model fails most tasks with any cache: the likelihood of the right answer is measured, too.
Of a cache with an archive it is told whether the passages that have the answer in them are among
those that were looked at most, and how much attention the rows got that were found.

Differences from RULER, besides those of the tasks: the answer's prefix ends without a space, which
the tokens of most models begin words with; where there is a chat template, the prefix comes behind
the assistant's header, also without the space before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pyh2o.errors import SettingsError
from pyh2o.llama import Llama

from .caches import MeasuredCache, check_budgets
from .measurement import Job, Measurement, Progress, QualitySettings, told_of
from .metrics import first_sentence, overlap, share_within
from .model import NamedText, open_for_tokens, trained_context
from .prompts import Prompt, Prompter, Turn, greedy_answer
from .reading import answer_surprises, found_share, spans_recalled, taken_back
from .recall_figures import (
    Answered,
    RecallSummary,
    RecallUnit,
    recall_picture,
    recall_tables,
    summed_up,
)
from .results import ResultFile
from .samples import Question, Sample
from .tables import TextTable
from .tasks import Task, task_named
from .words import Prose

When = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class RecallSettings(QualitySettings):
    """What the user asks for.

    Attributes:
        tasks: names (see tasks.py).
        tokens: lengths of a sample, with its answer.
        samples: of each task and length.
        questions: when the question is known.
        prose: text to hide things in; None for sentences that are made up.
        seed: of the samples.
    """

    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    samples: int
    questions: tuple[When, ...]
    prose: NamedText | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        return {"seed": self.seed, "text": "" if self.prose is None else self.prose.digest[:12]}

    def record(self) -> dict[str, Any]:
        record = super().record()
        del record["prose"]
        return record


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
        self._tasks = self._named_tasks()
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

    def _named_tasks(self) -> list[Task]:
        return [task_named(name) for name in self._settings.tasks]

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
                    prompt = prompter.prompt(sample.longest)
                    answer = max(task.answer_tokens, len(prompt.turns[-1].answer))
                    return prompt.n_tokens + answer <= tokens

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
        answers = []
        llm.reset()
        unread = list(prompt.context)
        if job.question != "before":
            llm.eval(unread)
            unread = []
        for question, turn in zip(sample.questions, prompt.turns, strict=True):
            unread += turn.read
            if job.question == "before":
                # Together with all that comes before it, and the cache is compacted behind it.
                llm.reset()
            llm.read(unread[:-1])
            answers.append(answered(llm, job.task, question, turn))
            if job.question != "before":
                unread = unread[-1:]
        return self._unit_with(answers, llm, job)

    def _unit_with(self, answers: list[Answered], llm: Llama, job: RecallJob) -> RecallUnit:
        """The unit of a job that is done."""
        self._progress.advance(f"{job.task.name}, {_title(job.question, job.cache)}", job.tokens)
        _, prompt = self._samples[job.task.name, job.tokens, job.sample]
        return RecallUnit(
            **told_of(job.cache, llm),
            task=job.task.name,
            tokens=job.tokens,
            question=job.question,
            sample=job.sample,
            prompt_tokens=prompt.n_tokens,
            answers=answers,
        )

    def summaries(self) -> list[RecallSummary]:
        return summed_up(self._units(), self._settings.tasks)

    def tables(self, summaries: Sequence[RecallSummary]) -> list[TextTable]:
        return recall_tables(summaries)

    def picture(self, summaries: Sequence[RecallSummary], file_format: str) -> bytes:
        return recall_picture(summaries, file_format)


def answered(llm: Llama, task: Task, question: Question, turn: Turn) -> Answered:
    """What comes behind a question that was read but for its last token; nothing of it stays."""
    last = turn.read[-1]
    with taken_back(llm):
        passages = spans_recalled(llm)
        answer = greedy_answer(llm, last, task.answer_tokens)
        passages += spans_recalled(llm)
        attention = found_share(llm)
        kv = llm.kv
    nll = float(answer_surprises(llm, last, turn.answer).mean(dtype=np.float64))
    rival = None
    if turn.rival:
        rival = float(answer_surprises(llm, last, turn.rival).mean(dtype=np.float64))
    found = None
    if llm.recalls:
        found = share_within(turn.places, passages, before=kv.unarchived + kv.archived)
    return Answered(
        references=list(question.references),
        answer=answer,
        score=question.score(answer),
        nll=nll,
        wrong=question.is_wrong(answer) if question.wrong else None,
        margin=None if rival is None else rival - nll,
        found=found,
        attention=attention,
        kind=question.kind,
        overlap=overlap(question.answer, first_sentence(answer)) if question.kind else None,
    )


def _title(question: str, cache: MeasuredCache) -> str:
    return f"question {question}, {cache.name}" if question else cache.name
