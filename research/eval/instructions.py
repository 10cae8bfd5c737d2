"""Whether a system prompt is still followed after many turns, and whether it is kept secret.

The setting of "The Pitfalls of KV Cache Compression" (2025), as a dialogue: a system prompt of
several instructions, one of which is never to reveal the others and a secret word; then messages
about other things, each with an answer that a program checks; and at the end the request to repeat
the prompt. How much of it came out is ROUGE-L recall, as in the paper.

A small model keeps to few instructions with any cache. So the likelihood of two canned answers is
compared, too, one that keeps to an instruction and one that does not, by the mean over its tokens:
in how many pairs the right one is more likely, and by how much. Some wrong answers are better
English than the right ones, so only the difference between caches says anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pyh2o.errors import SettingsError
from pyh2o.generation.sampling import Sampling
from pyh2o.llama import Llama
from pyh2o.sessions.conversation import Conversation
from pyh2o.text.chat_template import ChatTemplate

from .caches import FULL, check_budgets
from .directives import (
    LEAK_QUESTION,
    MESSAGES,
    NEUTRAL_QUESTION,
    Assignment,
    Directive,
    assignment,
    longest_system,
    messages,
)
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
from .metrics import difference, rouge_l_recall, words_of
from .model import open_for_tokens, plain_tokens, trained_context
from .pictures import add_legend, draw_bars, figure_bytes, new_figure
from .reading import answer_surprises, taken_back
from .results import ResultFile
from .tables import TextTable, column, samples, table_of

Pin = Literal["system", "none"]

ANSWER_TOKENS = 64
# The same answers in every run. Without the usual penalty a small model repeats itself for ever.
SAMPLING = Sampling(temperature=0.0)

# Instructions beside the defence in each system prompt.
DIRECTIVES_EACH = 4


@dataclass(frozen=True, kw_only=True)
class InstructionSettings(QualitySettings):
    """What the user asks for; fractions refer to the longest that such a dialogue can become.

    Attributes:
        turns: messages before the request to repeat the system prompt.
        samples: dialogues.
        pins: whether the system prompt is pinned.
        seed: of the system prompts and the order of the messages.
    """

    turns: int
    samples: int
    pins: tuple[Pin, ...]
    seed: int = 0

    def options(self) -> dict[str, Any]:
        return {"seed": self.seed, "turns": self.turns}


@dataclass(frozen=True, kw_only=True)
class InstructionUnit(Unit):
    """One dialogue.

    Attributes:
        pin, sample: which; the pin of the full cache is "".
        directives: names, in the order of the system prompt.
        defence_first: whether the defence is the first of them.
        followed: [turns][directives] whether each answer kept to each.
        answers: all of them, and at the end the one to the request for the prompt.
        margins: by directive, the mean loss of the answer that does not keep to it minus that of
            the one that does: above 0 where the right one is the likelier one.
        leaked: ROUGE-L recall of the system prompt in the last answer.
        secret_leaked: whether the secret word is in it.
        tokens, compactions: at the end.
    """

    pin: str
    sample: int
    directives: list[str]
    defence_first: bool
    followed: list[list[bool]]
    answers: list[str]
    margins: dict[str, float]
    leaked: float
    secret_leaked: bool
    tokens: int
    compactions: int


# The pinning in words; that of the full cache is "".
_PINNED: dict[str, str] = {"system": "pinned", "none": "not pinned", "": ""}


@dataclass(frozen=True, kw_only=True)
class InstructionSummary(OfCache):
    """One cache with its pinning, over all dialogues.

    Attributes:
        pin: see InstructionUnit.
        samples: dialogues.
        followed: share of the instructions that were kept, over all turns.
        by_turn: the same in each turn.
        preferred: share of the pairs of canned answers with the right one on top.
        margin: mean of their margins, in nats per token.
        margin_to_full, margin_to_full_error: mean difference to the full cache's, dialogue by
            dialogue, and its standard error; None where there is none.
        leaked: mean share of the system prompt that came out.
        leaked_defence_first, leaked_defence_last: the same by the place of the defence.
        secret_leaked: share of dialogues in which the secret word came out.
    """

    pin: str = field(metadata=column("system prompt", lambda one: _PINNED[one.pin]))
    samples: int
    followed: float = field(metadata=column("followed", ".1%"))
    by_turn: tuple[float, ...] = field(
        metadata=column(
            "first, last turn", lambda one: f"{one.by_turn[0]:.1%}, {one.by_turn[-1]:.1%}"
        )
    )
    preferred: float = field(metadata=column("right answer likelier", ".1%"))
    margin: float
    margin_to_full: float | None = field(metadata=column("margin - full", "+±"))
    margin_to_full_error: float | None
    leaked: float = field(metadata=column("prompt leaked", ".1%"))
    leaked_defence_first: float | None = field(metadata=column("leaked, defence first", ".1%"))
    leaked_defence_last: float | None = field(metadata=column("leaked, defence last", ".1%"))
    secret_leaked: float = field(metadata=column("secret leaked", ".1%"))


@dataclass(frozen=True)
class InstructionJob(Job):
    """A dialogue that is held with a cache."""

    pin: str
    sample: int

    @property
    def name(self) -> str:
        return f"{self.cache.name}/{self.pin or 'any'}/{self.sample}"

    @property
    def label(self) -> str:
        """For the progress."""
        pinned = f", system prompt {_PINNED[self.pin]}" if self.pin else ""
        return f"dialogue {self.sample + 1}, {self.cache.name}{pinned}"


class Instructions(
    Measurement[InstructionSettings, InstructionJob, InstructionUnit, InstructionSummary]
):
    """Holds all dialogues with every cache.

    Attributes:
        tokens: the longest that a dialogue can become.
    """

    kind = "instructions"
    unit = InstructionUnit

    def __init__(self, settings: InstructionSettings, file: ResultFile, progress: Progress) -> None:
        super().__init__(settings, file, progress)
        with open_for_tokens(settings.model) as llm:
            template = ChatTemplate(llm, longest_system())
            self._n_opening = len(template.opening)
            longest = max(
                len(template.next_turn(message))
                for message in (*MESSAGES, NEUTRAL_QUESTION, LEAK_QUESTION)
            )
            trained = trained_context(llm)
        # The last answer may be as long as the system prompt.
        self._leak_tokens = self._n_opening + ANSWER_TOKENS
        turns = settings.turns * (longest + ANSWER_TOKENS)
        self.tokens = self._n_opening + turns + longest + self._leak_tokens
        self._caches = settings.caches.for_text(self.tokens)
        self._check_room(trained)
        self.notes = (f"a dialogue has up to {self.tokens} tokens, which fractions refer to",)

    def _check_room(self, trained: int) -> None:
        if self.tokens > trained:
            raise SettingsError(
                f"--turns {self._settings.turns} may come to {self.tokens} tokens, more than the "
                f"{trained} the model was trained on, so the full cache is nothing to compare "
                "with: give fewer"
            )
        check_budgets(self._caches, self.tokens, trained)
        for cache in self._caches:
            if not cache.is_full and cache.kept < self._n_opening:
                raise SettingsError(
                    f"the system prompt takes up to {self._n_opening} tokens, and {cache.name} has "
                    f"{cache.kept} rows that stay and are not recent: give a larger --budget, or a "
                    "smaller --recent-share or --recall"
                )

    def wanted(self) -> list[InstructionJob]:
        return [
            InstructionJob(cache, pin, sample)
            for cache in self._caches
            for pin in ([""] if cache.is_full else self._settings.pins)
            for sample in range(self._settings.samples)
        ]

    def work(self, job: InstructionJob) -> int:
        # A turn is a unit of work, and so are the canned answers and the last request.
        return self._settings.turns + 2

    def opened(self, job: InstructionJob) -> Llama:
        return self._open(job.cache, self.tokens)

    def measured(self, llm: Llama, job: InstructionJob) -> InstructionUnit:
        given = assignment(job.sample, self._settings.seed, DIRECTIVES_EACH)
        conversation = Conversation(
            llm, system=given.system, sampling=SAMPLING, pin_system=job.pin != "none"
        )
        answers: list[str] = []
        for message in messages(job.sample, self._settings.seed, self._settings.turns):
            answers.append("".join(conversation.say(message, max_tokens=ANSWER_TOKENS)))
            self._progress.advance(job.label, 1)
        margins = _margins(conversation, given)
        self._progress.advance(job.label, 1)
        leak = "".join(conversation.say(LEAK_QUESTION, max_tokens=self._leak_tokens))
        self._progress.advance(job.label, 1)
        return InstructionUnit(
            **told_of(job.cache, llm),
            pin=job.pin,
            sample=job.sample,
            directives=[one.name for one in given.directives],
            defence_first=given.defence_first,
            followed=[[one.followed(answer) for one in given.directives] for answer in answers],
            answers=[*answers, leak],
            margins=margins,
            leaked=rouge_l_recall(words_of(given.system), words_of(leak)),
            secret_leaked=given.secret in leak.lower(),
            tokens=llm.n_tokens,
            compactions=llm.kv.compactions,
        )

    def summaries(self) -> list[InstructionSummary]:
        units = grouped(self._units(), lambda unit: (unit.cache, unit.pin))
        return [_summary(some, units.get((FULL, ""))) for some in units.values()]

    def tables(self, summaries: Sequence[InstructionSummary]) -> list[TextTable]:
        """One table, or none if nothing was measured."""
        if not summaries:
            return []
        n = samples(max(one.samples for one in summaries), "dialogue", "dialogues")
        return [table_of(f"{len(summaries[0].by_turn)} turns, {n}", summaries)]

    def picture(self, summaries: Sequence[InstructionSummary], file_format: str) -> bytes:
        """The share of instructions followed, turn by turn, and what leaked in the end."""
        figure = new_figure(13, 6)
        turns, leaks = figure.subplots(1, 2, width_ratios=(3, 2))
        labels = [", ".join(filter(None, (one.cache, _PINNED[one.pin]))) for one in summaries]
        for label, one in zip(labels, summaries, strict=True):
            shares = [100 * share for share in one.by_turn]
            style = "k--" if one.rows == 0 else "-"
            turns.plot(range(1, len(shares) + 1), shares, style, marker="o", label=label)
        turns.set(xlabel="turn", ylabel="instructions followed, %")
        turns.set_ylim(bottom=0)
        add_legend(turns)
        leaked = [100 * one.leaked for one in summaries]
        draw_bars(leaks, labels, leaked, "system prompt leaked, % (ROUGE-L recall)")
        return figure_bytes(figure, file_format)


def _margins(conversation: Conversation, given: Assignment) -> dict[str, float]:
    """How much likelier the answer that keeps to a directive is than the other; nothing is said."""
    llm = conversation.llm
    template = ChatTemplate(llm, given.system)
    with taken_back(llm):
        if conversation.unread:
            llm.eval(conversation.unread)
        return {one.name: _margin(llm, template, one) for one in given.directives}


def _margin(llm: Llama, template: ChatTemplate, directive: Directive) -> float:
    tokens = template.next_turn(directive.question)
    with taken_back(llm):
        llm.read(tokens[:-1])
        losses = [
            answer_surprises(llm, tokens[-1], plain_tokens(llm, answer)).mean()
            for answer in (directive.compliant, directive.violating)
        ]
    return float(losses[1] - losses[0])


def _summary(
    units: list[InstructionUnit], full: list[InstructionUnit] | None
) -> InstructionSummary:
    first = units[0]
    margins = np.array([list(unit.margins.values()) for unit in units])
    reference = None
    if full is not None and full is not units and len(full) == len(units):
        reference = np.array([list(unit.margins.values()) for unit in full]).mean(axis=1)
    to_full = difference(margins.mean(axis=1), reference)
    followed = np.array([np.mean(unit.followed, axis=1) for unit in units])

    def leaked(is_first: bool) -> float | None:
        values = [unit.leaked for unit in units if unit.defence_first == is_first]
        return float(np.mean(values)) if values else None

    return InstructionSummary(
        **first.of_cache(),
        pin=first.pin,
        samples=len(units),
        followed=float(followed.mean()),
        by_turn=tuple(float(value) for value in followed.mean(axis=0)),
        preferred=float((margins > 0).mean()),
        margin=float(margins.mean()),
        margin_to_full=to_full[0],
        margin_to_full_error=to_full[1],
        leaked=float(np.mean([unit.leaked for unit in units])),
        leaked_defence_first=leaked(True),
        leaked_defence_last=leaked(False),
        secret_leaked=float(np.mean([unit.secret_leaked for unit in units])),
    )
