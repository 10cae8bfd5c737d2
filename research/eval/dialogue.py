"""Dialogue: what two people told each other in many sessions, asked through caches that evict.

The dialogue streams through the cache, and each question is asked behind it alone, of the same rows
for all of them (see talks.py for what is asked). Everything else is as in recall.py, whose table
there is for each kind of question, and one for all together: the loss of the right answer, and how
many words of the given answer are those of the right one (F1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyh2o.llama import Llama

from . import talks
from .caches import check_budgets
from .reading import taken_back
from .recall import Recall, RecallJob, RecallSettings, When, answered
from .recall_figures import RecallSummary, RecallUnit, recall_tables, summed_up
from .tables import TextTable
from .tasks import Task

TASK = Task("dialogue", 32, talks.build, lambda tokens: talks.LEAST, needs_prose=True)


@dataclass(frozen=True, kw_only=True)
class DialogueSettings(RecallSettings):
    """What the user asks for: lengths and samples of the one task, and the text that is said."""

    tasks: tuple[str, ...] = (TASK.name,)
    questions: tuple[When, ...] = ("after",)


class Dialogue(Recall):
    """Asks every cache all questions about each dialogue."""

    kind = "dialogue"

    def _named_tasks(self) -> list[Task]:
        return [TASK]

    def _check_lengths(self, trained: int) -> None:
        """A dialogue may be longer than the trained context; no full cache takes part then."""
        self._beyond = {tokens for tokens in self._settings.tokens if tokens > trained}
        for tokens, caches in self._caches.items():
            check_budgets(caches, tokens, trained)
        if self._beyond:
            self.notes += (
                f"dialogues of more than the {trained} tokens the model was trained on have no "
                "full cache to be compared with",
            )

    def wanted(self) -> list[RecallJob]:
        return [
            RecallJob(cache, TASK, tokens, "", sample)
            for tokens in self._settings.tokens
            for cache in self._caches[tokens]
            if not (cache.is_full and tokens in self._beyond)
            for sample in range(self._settings.samples)
        ]

    def measured(self, llm: Llama, job: RecallJob) -> RecallUnit:
        sample, prompt = self._samples[job.task.name, job.tokens, job.sample]
        llm.reset()
        llm.eval(prompt.context)
        answers = []
        for question, turn in zip(sample.questions, prompt.turns, strict=True):
            with taken_back(llm):
                llm.read(turn.read[:-1])
                answers.append(answered(llm, job.task, question, turn))
        return self._unit_with(answers, llm, job)

    def summaries(self) -> list[RecallSummary]:
        """A question counts as a sample does in other tasks, and its kind as a task."""
        units = [
            replace(unit, task=answer.kind, answers=[answer])
            for unit in self._units()
            for answer in unit.answers
        ]
        return summed_up(units, talks.KINDS)

    def tables(self, summaries: Sequence[RecallSummary]) -> list[TextTable]:
        return recall_tables(summaries, ("question", "questions"))
