"""Recall: questions about facts in a long text, read with caches that evict.

A task can be asked in two ways. With the question "after", the context streams through the cache as
a conversation would, and the question is not known when rows are evicted. With the question
"before", context and question are read in full, the cache is compacted once, and the answer follows
(as in H2O and in kvpress with `query_aware`). For the full cache both are the same.

A weak model fails most tasks with any cache, so the likelihood of the right answer is measured,
too. For a cache with an archive, the results include whether the passages with the answer are among
those retrieved most, and the retrieved rows' share of attention.

Differences from RULER, besides those of the tasks: the answer's prefix ends without a space, which
the tokens of most models start words with; with a chat template, the prefix comes after the
assistant's header, also without the space before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pyh2o.compat.llama import Llama
from pyh2o.errors import SettingsError

from .caches import FULL, check_budgets
from .measurement import (
    OF_CACHE,
    Job,
    Measurement,
    Settings,
    count_of,
    grouped,
    mean_of,
)
from .metrics import difference, share_within
from .model import NamedText, open_for_tokens, trained_context
from .prompts import Prompt, Prompter, greedy_answer
from .reading import answer_surprises, found_share, spans_recalled, taken_back
from .results import ResultFile, Unit
from .samples import Sample, string_match_all
from .tables import TextTable, column, table_of
from .tasks import Task, task_named
from .words import Prose

When = Literal["before", "after"]

# Name of a group of tasks.
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class RecallSettings(Settings):
    """Requested tasks and samples.

    Attributes:
        tasks: names (see tasks.py).
        tokens: lengths of a sample, with its answer.
        samples: of each task and length.
        questions: when the question is known.
        prose: text to hide facts in; None for made-up sentences.
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


class Recall(Measurement[RecallSettings]):
    """Asks all questions with every cache; a job's `what` is its task, length, question and sample.

    The question of the full cache is "".
    """

    kind = "recall"

    def __init__(self, settings: RecallSettings, file: ResultFile) -> None:
        super().__init__(settings, file)
        tasks = [task_named(name) for name in settings.tasks]
        self._caches = {tokens: settings.caches.for_text(tokens) for tokens in settings.tokens}
        with open_for_tokens(settings.model) as llm:
            trained = trained_context(llm)
            for tokens, caches in self._caches.items():
                if tokens > trained:
                    raise SettingsError(
                        f"--tokens {tokens} is more than the {trained} the model was trained on, "
                        "so no full cache can answer: give fewer"
                    )
                check_budgets(caches, tokens, trained)
            prompter = Prompter(llm)
            self._samples = self._make_samples(prompter)
        if settings.prose is None and any(task.needs_prose for task in tasks):
            self.notes += (
                "the prose is made up, since no --text was given: facts in it are "
                "easier to find than in RULER's essays",
            )
        if not prompter.is_chat:
            self.notes += ("the model has no chat template: it continues the plain text",)

    def _make_samples(
        self, prompter: Prompter
    ) -> dict[tuple[str, int, int], tuple[Sample, Prompt]]:
        """Return every sample with its tokens, by task, length and number."""
        settings = self._settings
        prose = Prose(None if settings.prose is None else settings.prose.text, settings.seed)
        made: dict[tuple[str, int, int], tuple[Sample, Prompt]] = {}
        for name in settings.tasks:
            for tokens in settings.tokens:
                task = task_named(name)

                def fits(sample: Sample, task: Task = task, most: int = tokens) -> bool:
                    prompt = prompter.prompt(sample)
                    return prompt.n_tokens + max(task.answer_tokens, len(prompt.answer)) <= most

                for index in range(settings.samples):
                    sample = task.sample(index, tokens, settings.seed, prose, fits)
                    made[name, tokens, index] = sample, prompter.prompt(sample)
        return made

    def wanted(self) -> list[Job]:
        return [
            Job(
                cache,
                f"{task}/{tokens}/{question or 'any'}/{cache.name}/{sample}",
                (task, tokens, question, sample),
                opening=(tokens, question, cache),
            )
            for task in self._settings.tasks
            for tokens in self._settings.tokens
            for cache in self._caches[tokens]
            for question in ([""] if cache.is_full else self._settings.questions)
            for sample in range(self._settings.samples)
        ]

    def opened(self, job: Job) -> Llama:
        _, tokens, question, _ = job.what
        prefill: dict[str, Any] = {"prefill": "exact"} if question == "before" else {}
        return self._open(job.cache, tokens, **prefill)

    def measured(self, llm: Llama, job: Job) -> Unit:
        task, tokens, question, number = job.what
        sample, prompt = self._samples[task, tokens, number]
        llm.reset()
        if question == "before":
            # At once; the cache is compacted after the question.
            llm.text.read([*prompt.context, *prompt.asked[:-1]])
        else:
            llm.eval(prompt.context)
            llm.text.read(prompt.asked[:-1])
        return {
            "task": task,
            "tokens": tokens,
            "question": question,
            "sample": number,
            "prompt_tokens": prompt.n_tokens,
            **answered(llm, sample, prompt, task_named(task).answer_tokens),
        }

    def tables(self) -> list[TextTable]:
        return recall_tables(self._units(), self._settings.tasks)


def answered(llm: Llama, sample: Sample, prompt: Prompt, most_tokens: int) -> Unit:
    """Answer a question that was read except for its last token, and restore the text.

    Returns:
        references and answer; score, the share of the references in it; nll, the mean loss of the
        right answer's tokens; found, the share of the places with the answer, as far as their rows
        can be evicted, that were completely among the passages retrieved most; attention, the
        retrieved rows' share of attention. Both are None for a cache without an archive.
    """
    last = prompt.asked[-1]
    with taken_back(llm):
        passages = spans_recalled(llm)
        answer = greedy_answer(llm, last, most_tokens)
        passages += spans_recalled(llm)
        attention = found_share(llm)
        kv = llm.kv
    found = None
    if llm.text.model.recalls:
        found = share_within(prompt.places, passages, before=kv.unarchived + kv.archived)
    return {
        "references": list(sample.references),
        "answer": answer,
        "score": string_match_all(answer, sample.references),
        "nll": float(answer_surprises(llm, last, prompt.answer).mean(dtype=np.float64)),
        "found": found,
        "attention": attention,
    }


# -------------------------------------------------------------------------------------------------
# Figures of the answers
# -------------------------------------------------------------------------------------------------

FIGURES = [
    *OF_CACHE,
    column("question", "question"),
    column("score", "score", ".1f"),
    column("of full", "score_of_full", ".0%"),
    column("NLL of the answer", "nll", ".3f"),
    column("NLL - full", "nll_to_full", "+.4f±"),
    column("passage found", "found", ".0%"),
    column("attention found", "attention", ".1%"),
]


def recall_tables(units: Sequence[Unit], tasks: Sequence[str]) -> list[TextTable]:
    """Return a table for each length and task, and one of all tasks together."""
    tables = []
    together = [{**unit, "task": ALL} for unit in units] if len(tasks) > 1 else []
    for tokens, of_length in grouped([*units, *together], lambda one: one["tokens"]).items():
        by_task = grouped(of_length, lambda one: one["task"])
        for task in filter(by_task.__contains__, [*tasks, ALL]):
            caches = grouped(by_task[task], lambda one: (one["question"], one["cache"]))
            full = caches.get(("", FULL))
            n = count_of(max(map(len, caches.values())), "sample", "samples")
            name = "all tasks" if task == ALL else task
            figures = [summed_up(own, full) for own in caches.values()]
            tables.append(table_of(f"{name}, {tokens:,} tokens, {n}", figures, FIGURES))
    return tables


def summed_up(units: list[Unit], full: list[Unit] | None) -> dict[str, Any]:
    """Return the figures of one cache in one task: means over its samples, the score in percent.

    Args:
        units: of the cache.
        full: those of the full cache; nll_to_full is the mean difference, sample by sample.
    """
    losses = np.array([unit["nll"] for unit in units])
    score = float(np.mean([unit["score"] for unit in units]))
    of_full = reference = None
    if full is not None and len(full) == len(units):
        score_of_full = float(np.mean([unit["score"] for unit in full]))
        of_full = score / score_of_full if score_of_full else None
        if full is not units:
            reference = np.array([unit["nll"] for unit in full])
    to_full = difference(losses, reference)
    return {
        **units[0],
        "score": 100 * score,
        "score_of_full": of_full,
        "nll": float(losses.mean()),
        "nll_to_full": to_full[0],
        "nll_to_full_error": to_full[1],
        "found": mean_of(unit["found"] for unit in units),
        "attention": mean_of(unit["attention"] for unit in units),
    }
