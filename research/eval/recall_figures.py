"""What the answers of recall come to: units, summaries, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .caches import FULL
from .measurement import OfCache, Unit, grouped
from .metrics import difference
from .pictures import draw_lines, figure_bytes, new_figure
from .tables import Column, TextTable, column, columns_of, samples, table_of

# What stands for several tasks together.
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A question and what became of it.

    Attributes:
        references: what the answer should have in it.
        answer: that was generated.
        score: share of the references in it, 0 for a wrong one (see samples.Question).
        nll: mean loss of the tokens of the right answer, in nats.
        wrong: whether it gives what it must not; None where there is nothing of that kind.
        margin: how much larger the mean loss of such a wrong answer is than that of the right one.
        found: share of the places with the answer, as far as rows of them may be evicted, that
            were as a whole among the passages looked at most; None without any, or for a cache
            without an archive.
        attention: share of the question's and the answer's attention that rows got which were
            found; None for such a cache.
        kind: of what was asked for (see samples.Question).
        overlap: F1 of the words of the answer's first sentence; None where nothing has a kind.
    """

    references: list[str]
    answer: str
    score: float
    nll: float
    wrong: bool | None = None
    margin: float | None = None
    found: float | None = None
    attention: float | None = None
    kind: str = ""
    overlap: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecallUnit(Unit):
    """One sample, with the answers to all its questions.

    Attributes:
        task, tokens, question, sample: which; the question of the full cache is "", and so it is of
            all where it comes after the text in any case.
        prompt_tokens: of the text up to the last answer.
        answers: to its questions, in their order.
    """

    task: str
    tokens: int
    question: str
    sample: int
    prompt_tokens: int
    answers: list[Answered]

    def __post_init__(self) -> None:
        """In a file of results answers are plain dictionaries."""
        answers = [one if isinstance(one, Answered) else Answered(**one) for one in self.answers]
        object.__setattr__(self, "answers", answers)

    @property
    def score(self) -> float:
        """Mean of those of its answers."""
        return float(np.mean([one.score for one in self.answers]))

    @property
    def nll(self) -> float:
        """Mean of those of its answers."""
        return float(np.mean([one.nll for one in self.answers]))


@dataclass(frozen=True, kw_only=True)
class RecallSummary(OfCache):
    """One cache in one task; the task "all" is the mean over all tasks.

    Attributes:
        task, tokens, question: see RecallUnit.
        samples: texts.
        score: mean of their scores, in percent.
        score_of_full: what share of the full cache's score that is; None where that is 0.
        nll: mean loss of the right answers' tokens.
        nll_to_full, nll_to_full_error: mean difference to the full cache's, sample by sample, and
            its standard error; None where there is none.
        overlap, wrong, margin, found, attention: means of those of the answers that have one (see
            Answered).
        by_question: score of the first question of a text, of the second, and so on, in percent;
            empty where texts have different numbers of them.
    """

    task: str
    tokens: int
    question: str = field(metadata=column("question"))
    samples: int
    score: float = field(metadata=column("score", ".1f"))
    score_of_full: float | None = field(metadata=column("of full", ".0%"))
    overlap: float | None = field(metadata=column("overlap", ".2f"))
    nll: float = field(metadata=column("NLL of the answer", ".3f"))
    nll_to_full: float | None = field(metadata=column("NLL - full", "+±"))
    nll_to_full_error: float | None
    wrong: float | None = field(metadata=column("wrong answer given", ".0%"))
    margin: float | None = field(metadata=column("NLL of the wrong one - right one", "+.3f"))
    found: float | None = field(metadata=column("passage found", ".0%"))
    attention: float | None = field(metadata=column("attention found", ".1%"))
    by_question: tuple[float, ...]


def summed_up(units: Sequence[RecallUnit], tasks: Sequence[str]) -> list[RecallSummary]:
    """The figures of all units, task by task, and those of all tasks together."""
    found = grouped(units, lambda unit: (unit.task, unit.tokens, unit.question, unit.cache))
    if len(tasks) > 1:
        found |= grouped(units, lambda unit: (ALL, unit.tokens, unit.question, unit.cache))
    order = [*tasks, ALL]
    return [
        _summary(key[0], found[key], found.get((key[0], key[1], "", FULL)))
        for key in sorted(found, key=lambda key: (key[1], order.index(key[0])))
    ]


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
    answers = [answer for unit in units for answer in unit.answers]
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
        wrong=_mean([one.wrong for one in answers]),
        margin=_mean([one.margin for one in answers]),
        overlap=_mean([one.overlap for one in answers]),
        found=_mean([one.found for one in answers]),
        attention=_mean([one.attention for one in answers]),
        by_question=_by_question(units),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _by_question(units: list[RecallUnit]) -> tuple[float, ...]:
    if len({len(unit.answers) for unit in units}) > 1:
        return ()
    scores = np.array([[one.score for one in unit.answers] for unit in units])
    return tuple(float(score) for score in 100 * scores.mean(axis=0))


def recall_tables(
    summaries: Sequence[RecallSummary], of: tuple[str, str] = ("sample", "samples")
) -> list[TextTable]:
    """A table for each task and length, and one of its questions where a text has several.

    Args:
        summaries: the figures.
        of: what they are means of, one and many.
    """
    tables = []
    for (task, tokens), own in grouped(summaries, lambda one: (one.task, one.tokens)).items():
        name = "all tasks" if task == ALL else task
        title = f"{name}, {tokens:,} tokens"
        n = samples(max(one.samples for one in own), *of)
        # Few tasks have wrong answers of a kind, and not every cache has an archive.
        columns = [one for one in columns_of(RecallSummary) if any(map(one[1], own))]
        tables.append(table_of(f"{title}, {n}", own, columns))
        n_questions = len(own[0].by_question)
        if n_questions > 1:
            names = [one for one in columns if one[0] in ("cache", "question")]
            columns = [*names, *map(_question_column, range(n_questions))]
            tables.append(table_of(f"{title}, score of each question", own, columns))
    return tables


def _question_column(index: int) -> Column[RecallSummary]:
    return f"question {index + 1}", lambda one: f"{one.by_question[index]:.1f}"


def recall_picture(summaries: Sequence[RecallSummary], file_format: str) -> bytes:
    """Scores and losses by budget: those of all tasks together where there are several."""
    together = [one for one in summaries if one.task == ALL]
    own = together or list(summaries)
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


def _line(one: RecallSummary) -> str:
    """Caches that differ in their budget only are on one line."""
    question = f", question {one.question}" if one.question else ""
    return f"{one.but_for_budget}{question}, {one.tokens:,} tokens"
