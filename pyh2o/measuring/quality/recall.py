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

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llama_cpp.llama_cpp import llama_vocab_is_eog

from ...errors import SettingsError
from ...generation.writer import Writer
from ...llama import Llama
from ...text.chat_template import ChatTemplate
from ...text.detokenizer import detokenize, detokenizer
from .caches import (
    CacheSettings,
    Compute,
    EvalCache,
    caches_to_compare,
    check_caches,
    check_full,
    open_for_tokens,
    open_llama,
)
from .metrics import mean_and_error
from .progress import Progress
from .reading import GREEDY, answer_surprises
from .results import ResultFile
from .samples import Sample, string_match_all
from .tasks import Task, task_named
from .texts import bos_tokens
from .words import Prose

Question = Literal["before", "after"]

# Stands for a question that is not known yet.
_OTHER_QUESTION = "\n?"


@dataclass(frozen=True)
class RecallSettings:
    """What the user asks for.

    Attributes:
        model: a GGUF file.
        compute: what computes.
        tasks: names of RULER's tasks.
        tokens: lengths of a sample, with its answer.
        samples: of each task and length.
        questions: when the question is known.
        prose: text to hide things in; None for sentences that are made up.
        seed: of the samples.
        caches: what is compared.
    """

    model: Path
    compute: Compute
    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    samples: int
    questions: tuple[Question, ...]
    prose: str | None
    seed: int
    caches: CacheSettings


@dataclass(frozen=True)
class Prompt:
    """The tokens of a sample.

    Attributes:
        context: what can be read before the question is known.
        rest: the question and the beginning of the answer.
        answer: the right one.
    """

    context: list[int]
    rest: list[int]
    answer: list[int]


@dataclass(frozen=True)
class RecallUnit:
    """One answer.

    Attributes:
        task, tokens, question, cache, sample: which; the question of the full cache is "".
        policy, budget, rows: of the cache.
        capacity: rows that it has at most, just before a compaction; 0 without a limit.
        prompt_tokens: of the prompt, with the beginning of the answer.
        references: what the answer should have in it.
        answer: that was generated.
        score: share of the references in it.
        nll: mean loss of the tokens of the right answer, in nats.
        seconds: it took.
    """

    task: str
    tokens: int
    question: str
    cache: str
    sample: int
    policy: str
    budget: str
    rows: int
    capacity: int
    prompt_tokens: int
    references: list[str]
    answer: str
    score: float
    nll: float
    seconds: float


@dataclass(frozen=True)
class RecallSummary:
    """One cache in one task; the task "all" is the mean over all tasks.

    Attributes:
        task, tokens, question, cache, policy, budget, rows, capacity: see RecallUnit.
        samples: answers.
        score: mean of their scores, in percent.
        score_of_full: what share of the full cache's score that is; None where that is 0.
        nll: mean loss of the right answers' tokens.
        nll_to_full, nll_to_full_error: mean difference to the full cache's, sample by sample, and
            its standard error; None where there is none.
    """

    task: str
    tokens: int
    question: str
    cache: str
    policy: str
    budget: str
    rows: int
    capacity: int
    samples: int
    score: float
    score_of_full: float | None
    nll: float
    nll_to_full: float | None
    nll_to_full_error: float | None


class Prompter:
    """Turns samples into tokens, through the model's chat template if it has one."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        has_template = "tokenizer.chat_template" in llm.metadata
        self._template = ChatTemplate(llm, None) if has_template else None

    @property
    def is_chat(self) -> bool:
        """Whether samples are asked in a chat."""
        return self._template is not None

    def prompt(self, sample: Sample) -> Prompt:
        """The tokens of a sample."""
        tokens = self._asked(sample.context + sample.question)
        # The same for every question.
        other = self._asked(sample.context + _OTHER_QUESTION)
        pairs = enumerate(zip(tokens, other, strict=False))
        n_context = next((i for i, (a, b) in pairs if a != b), len(other))
        prefix = sample.prefix.lstrip() if self.is_chat else sample.prefix
        begun = self._text(prefix)
        return Prompt(
            tokens[:n_context],
            [*tokens[n_context:], *begun],
            self._continued(prefix, begun, sample.answer),
        )

    def _asked(self, message: str) -> list[int]:
        if self._template is not None:
            return self._template.first_turn(message)
        return [*bos_tokens(self._llm), *self._text(message)]

    def _continued(self, before: str, tokens: list[int], text: str) -> list[int]:
        """Tokens of a text that goes on after another one."""
        joined = self._text(before + text)
        return joined[len(tokens) :] if joined[: len(tokens)] == tokens else self._text(text)

    def _text(self, text: str) -> list[int]:
        tokens: list[int] = self._llm.tokenize(text.encode(), add_bos=False, special=False)
        return tokens


class Recall:
    """Asks every cache all questions.

    Attributes:
        notes: what to know when reading the figures.
    """

    def __init__(self, settings: RecallSettings, file: ResultFile, progress: Progress) -> None:
        """Look at the model and make the samples; nothing is measured yet.

        Args:
            settings: what is asked for.
            file: where the results go.
            progress: told what goes on.

        Raises:
            PyH2OError: the model is refused, or a task, a length or a budget makes no sense.
        """
        self._settings = settings
        self._file = file
        self._progress = progress
        self._tasks = [task_named(name) for name in settings.tasks]
        self._caches = {
            tokens: caches_to_compare(settings.caches, tokens) for tokens in settings.tokens
        }
        with open_for_tokens(settings.model) as llm:
            self._check_lengths(llm)
            prompter = Prompter(llm)
            self.is_chat = prompter.is_chat
            self._samples = self._make_samples(prompter)
        self.notes = self._notes()

    def run(self) -> None:
        """Measure what the file has not.

        Raises:
            PyH2OError: a cache is refused, or there is too little memory.
        """
        missing = [one for one in self._wanted() if _name(*one) not in self._file.units]
        self._progress.plan(sum(tokens for _, tokens, _, _, _ in missing))
        opened = dict.fromkeys(
            (tokens, question, cache) for _, tokens, question, cache, _ in missing
        )
        for tokens, question, cache in opened:
            with self._open(tokens, question, cache) as llm:
                for one in missing:
                    if one[1:4] == (tokens, question, cache):
                        self._file.add(_name(*one), asdict(self._answer(llm, *one)))
                        self._progress.advance(f"{one[0].name}, {_title(question, cache)}", tokens)

    def summaries(self) -> list[RecallSummary]:
        """The figures of all that has been measured, in the order in which it was asked for."""
        units: dict[tuple[str, int, str, str], list[RecallUnit]] = {}
        for one in self._wanted():
            if (data := self._file.units.get(_name(*one))) is not None:
                unit = RecallUnit(**data)
                names = (unit.task, *(["all"] if len(self._tasks) > 1 else []))
                for task in names:
                    units.setdefault((task, unit.tokens, unit.question, unit.cache), []).append(
                        unit
                    )
        order = [*self._settings.tasks, "all"]
        ordered = sorted(units, key=lambda key: (key[1], order.index(key[0])))
        return [
            _summary(
                task, units[task, tokens, question, cache], units.get((task, tokens, "", "full"))
            )
            for task, tokens, question, cache in ordered
        ]

    def _check_lengths(self, llm: Llama) -> None:
        trained = llm._model.n_ctx_train()
        for tokens in self._settings.tokens:
            if tokens > trained:
                raise SettingsError(
                    f"--tokens {tokens} is more than the {trained} the model was trained on, so no "
                    "full cache can answer: give fewer"
                )
            check_caches(self._caches[tokens], tokens, trained)

    def _make_samples(
        self, prompter: Prompter
    ) -> dict[tuple[str, int, int], tuple[Sample, Prompt]]:
        """Every sample with its tokens, by task, length and number."""
        settings = self._settings
        prose = Prose(settings.prose, settings.seed)
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

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self._settings.prose is None and any(task.needs_prose for task in self._tasks):
            notes.append(
                "the prose is made up of simple sentences, since no --text was given: it is easier "
                "to find something in than RULER's essays"
            )
        if not self.is_chat:
            notes.append("the model has no chat template: it goes on with the plain text")
        return tuple(notes)

    def _wanted(self) -> list[tuple[Task, int, str, EvalCache, int]]:
        """Task, length, question, cache and sample of all units."""
        questions: Sequence[str] = self._settings.questions
        return [
            (task, tokens, question, cache, sample)
            for task in self._tasks
            for tokens in self._settings.tokens
            for cache in self._caches[tokens]
            for question in ([""] if cache.is_full else questions)
            for sample in range(self._settings.samples)
        ]

    def _open(self, tokens: int, question: str, cache: EvalCache) -> Llama:
        prefill: dict[str, Any] = {"prefill": "exact"} if question == "before" else {}
        return open_llama(
            self._settings.model, cache, window=tokens, compute=self._settings.compute, **prefill
        )

    def _answer(
        self, llm: Llama, task: Task, tokens: int, question: str, cache: EvalCache, index: int
    ) -> RecallUnit:
        started = time.perf_counter()
        sample, prompt = self._samples[task.name, tokens, index]
        llm.reset()
        if question == "before":
            llm.eval([*prompt.context, *prompt.rest[:-1]])
        else:
            llm.eval(prompt.context)
            if len(prompt.rest) > 1:
                llm.eval(prompt.rest[:-1])
        last = prompt.rest[-1]
        losses = answer_surprises(llm, last, prompt.answer)
        answer = _generated(llm, last, task.answer_tokens)
        if cache.is_full:
            check_full(llm)
        return RecallUnit(
            task=task.name,
            tokens=tokens,
            question=question,
            cache=cache.name,
            sample=index,
            policy=cache.policy,
            budget=cache.budget,
            rows=cache.rows,
            capacity=0 if cache.is_full else llm.kv.capacity,
            prompt_tokens=len(prompt.context) + len(prompt.rest),
            references=list(sample.references),
            answer=answer,
            score=string_match_all(answer, sample.references),
            nll=float(losses.mean(dtype=np.float64)),
            seconds=round(time.perf_counter() - started, 3),
        )


def _generated(llm: Llama, last: int, max_tokens: int) -> str:
    """What the model says after the token `last`, always taking the likeliest token."""
    tokens: list[int] = []
    with closing(Writer(llm, GREEDY).write([last])) as drawn:
        for token in drawn:
            if llama_vocab_is_eog(llm._model.vocab, token):
                break
            tokens.append(token)
            if len(tokens) == max_tokens:
                break
    parts = detokenizer(llm, [last], starts_text=False)
    return detokenize(parts, tokens).decode(errors="replace")


def _summary(task: str, units: list[RecallUnit], full: list[RecallUnit] | None) -> RecallSummary:
    first = units[0]
    score = float(np.mean([unit.score for unit in units]))
    of_full = None
    difference: tuple[float | None, float | None] = None, None
    if full is not None and len(full) == len(units):
        score_of_full = float(np.mean([unit.score for unit in full]))
        of_full = score / score_of_full if score_of_full else None
        if units is not full:
            difference = mean_and_error(
                np.array([own.nll - other.nll for own, other in zip(units, full, strict=True)])
            )
    return RecallSummary(
        task=task,
        tokens=first.tokens,
        question=first.question,
        cache=first.cache,
        policy=first.policy,
        budget=first.budget,
        rows=first.rows,
        capacity=first.capacity,
        samples=len(units),
        score=100 * score,
        score_of_full=of_full,
        nll=float(np.mean([unit.nll for unit in units])),
        nll_to_full=difference[0],
        nll_to_full_error=difference[1],
    )


def _name(task: Task, tokens: int, question: str, cache: EvalCache, sample: int) -> str:
    return "/".join([task.name, str(tokens), question or "any", cache.name, str(sample)])


def _title(question: str, cache: EvalCache) -> str:
    return f"question {question}, {cache.name}" if question else cache.name
