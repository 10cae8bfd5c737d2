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

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...errors import SettingsError
from ...generation.sampling import Sampling
from ...llama import Llama
from ...sessions.conversation import Conversation
from ...text.chat_template import ChatTemplate
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
from .metrics import mean_and_error, rouge_l_recall, words_of
from .progress import Progress
from .reading import answer_surprises, taken_back
from .results import ResultFile

Pin = Literal["system", "none"]

ANSWER_TOKENS = 64
# The same answers in every run. Without the usual penalty a small model repeats itself for ever.
SAMPLING = Sampling(temperature=0.0)

# Instructions beside the defence in each system prompt.
DIRECTIVES_EACH = 4


@dataclass(frozen=True)
class InstructionSettings:
    """What the user asks for.

    Attributes:
        model: a GGUF file.
        compute: what computes.
        turns: messages before the request to repeat the system prompt.
        samples: dialogues.
        pins: whether the system prompt is pinned.
        seed: of the system prompts and the order of the messages.
        caches: what is compared; fractions refer to the longest that such a dialogue can become.
    """

    model: Path
    compute: Compute
    turns: int
    samples: int
    pins: tuple[Pin, ...]
    seed: int
    caches: CacheSettings


@dataclass(frozen=True)
class InstructionUnit:
    """One dialogue.

    Attributes:
        cache, pin, sample: which; the pin of the full cache is "".
        policy, budget, rows: of the cache.
        capacity: rows that it has at most, just before a compaction; 0 without a limit.
        directives: names, in the order of the system prompt.
        defence_first: whether the defence is the first of them.
        followed: [turns][directives] whether each answer kept to each.
        answers: all of them, and at the end the one to the request for the prompt.
        margins: by directive, the mean loss of the answer that does not keep to it minus that of
            the one that does: above 0 where the right one is the likelier one.
        leaked: ROUGE-L recall of the system prompt in the last answer.
        secret_leaked: whether the secret word is in it.
        tokens, compactions: at the end.
        seconds: it took.
    """

    cache: str
    pin: str
    sample: int
    policy: str
    budget: str
    rows: int
    capacity: int
    directives: list[str]
    defence_first: bool
    followed: list[list[bool]]
    answers: list[str]
    margins: dict[str, float]
    leaked: float
    secret_leaked: bool
    tokens: int
    compactions: int
    seconds: float


@dataclass(frozen=True)
class InstructionSummary:
    """One cache with its pinning, over all dialogues.

    Attributes:
        cache, pin, policy, budget, rows, capacity: see InstructionUnit.
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

    cache: str
    pin: str
    policy: str
    budget: str
    rows: int
    capacity: int
    samples: int
    followed: float
    by_turn: tuple[float, ...]
    preferred: float
    margin: float
    margin_to_full: float | None
    margin_to_full_error: float | None
    leaked: float
    leaked_defence_first: float | None
    leaked_defence_last: float | None
    secret_leaked: float


class Instructions:
    """Holds all dialogues with every cache.

    Attributes:
        tokens: the longest that a dialogue can become.
        notes: what to know when reading the figures.
    """

    def __init__(self, settings: InstructionSettings, file: ResultFile, progress: Progress) -> None:
        """Look at the model; nothing is measured yet.

        Args:
            settings: what is asked for.
            file: where the results go.
            progress: told what goes on.

        Raises:
            PyH2OError: the model is refused or has no place for a system prompt, or a budget has
                none for it.
        """
        self._settings = settings
        self._file = file
        self._progress = progress
        with open_for_tokens(settings.model) as llm:
            template = ChatTemplate(llm, longest_system())
            self._n_opening = len(template.opening)
            longest = max(
                len(template.next_turn(message))
                for message in (*MESSAGES, NEUTRAL_QUESTION, LEAK_QUESTION)
            )
            trained = llm._model.n_ctx_train()
        # The last answer may be as long as the system prompt.
        turns = settings.turns * (longest + ANSWER_TOKENS)
        self.tokens = self._n_opening + turns + longest + self._leak_tokens
        self._caches = caches_to_compare(settings.caches, self.tokens)
        self._check_room(trained)
        self.notes: tuple[str, ...] = (
            f"a dialogue has up to {self.tokens} tokens, which fractions refer to",
        )

    @property
    def _leak_tokens(self) -> int:
        return self._n_opening + ANSWER_TOKENS

    def run(self) -> None:
        """Measure what the file has not.

        Raises:
            PyH2OError: a cache is refused, or there is too little memory.
        """
        missing = [one for one in self._wanted() if _name(*one) not in self._file.units]
        # A turn is a unit of work, and so are the canned answers and the last request.
        self._progress.plan(len(missing) * (self._settings.turns + 2))
        for cache in dict.fromkeys(cache for cache, _, _ in missing):
            with open_llama(
                self._settings.model, cache, window=self.tokens, compute=self._settings.compute
            ) as llm:
                for one in missing:
                    if one[0] == cache:
                        self._file.add(_name(*one), asdict(self._dialogue(llm, *one)))

    def summaries(self) -> list[InstructionSummary]:
        """The figures of all that has been measured, in the order in which it was asked for."""
        units: dict[tuple[str, str], list[InstructionUnit]] = {}
        for one in self._wanted():
            if (data := self._file.units.get(_name(*one))) is not None:
                unit = InstructionUnit(**data)
                units.setdefault((unit.cache, unit.pin), []).append(unit)
        full = units.get((FULL_CACHE.name, ""))
        return [_summary(some, full) for some in units.values()]

    def _check_room(self, trained: int) -> None:
        if self.tokens > trained:
            raise SettingsError(
                f"--turns {self._settings.turns} may come to {self.tokens} tokens, more than the "
                f"{trained} the model was trained on, so the full cache is nothing to compare "
                "with: give fewer"
            )
        check_caches(self._caches, self.tokens, trained)
        for cache in self._caches:
            if not cache.is_full and cache.rows - cache.recent < self._n_opening:
                raise SettingsError(
                    f"the system prompt takes up to {self._n_opening} tokens, and {cache.name} has "
                    f"{cache.rows - cache.recent} rows that are not recent: give a larger --budget "
                    "or a smaller --recent-share"
                )

    def _wanted(self) -> list[tuple[EvalCache, str, int]]:
        """Cache, pinning and sample of all units."""
        return [
            (cache, pin, sample)
            for cache in self._caches
            for pin in ([""] if cache.is_full else self._settings.pins)
            for sample in range(self._settings.samples)
        ]

    def _dialogue(self, llm: Llama, cache: EvalCache, pin: str, index: int) -> InstructionUnit:
        started = time.perf_counter()
        compactions = llm.kv.compactions
        given = assignment(index, self._settings.seed, DIRECTIVES_EACH)
        label = f"dialogue {index + 1}, {_title(cache, pin)}"
        conversation = Conversation(
            llm, system=given.system, sampling=SAMPLING, pin_system=pin != "none"
        )
        answers: list[str] = []
        for message in messages(index, self._settings.seed, self._settings.turns):
            answers.append("".join(conversation.say(message, max_tokens=ANSWER_TOKENS)))
            self._progress.advance(label, 1)
        margins = _margins(conversation, given)
        self._progress.advance(label, 1)
        leak = "".join(conversation.say(LEAK_QUESTION, max_tokens=self._leak_tokens))
        self._progress.advance(label, 1)
        if cache.is_full:
            check_full(llm)
        return InstructionUnit(
            cache=cache.name,
            pin=pin,
            sample=index,
            policy=cache.policy,
            budget=cache.budget,
            rows=cache.rows,
            capacity=0 if cache.is_full else llm.kv.capacity,
            directives=[one.name for one in given.directives],
            defence_first=given.defence_first,
            followed=[[one.followed(answer) for one in given.directives] for answer in answers],
            answers=[*answers, leak],
            margins=margins,
            leaked=rouge_l_recall(words_of(given.system), words_of(leak)),
            secret_leaked=given.secret in leak.lower(),
            tokens=llm.n_tokens,
            compactions=llm.kv.compactions - compactions,
            seconds=round(time.perf_counter() - started, 3),
        )


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
        llm.eval(tokens[:-1])
        losses = [
            answer_surprises(
                llm, tokens[-1], llm.tokenize(answer.encode(), add_bos=False, special=False)
            ).mean()
            for answer in (directive.compliant, directive.violating)
        ]
    return float(losses[1] - losses[0])


def _summary(
    units: list[InstructionUnit], full: list[InstructionUnit] | None
) -> InstructionSummary:
    first = units[0]
    margins = np.array([list(unit.margins.values()) for unit in units])
    difference: tuple[float | None, float | None] = None, None
    if full is not None and full is not units and len(full) == len(units):
        theirs = np.array([list(unit.margins.values()) for unit in full])
        difference = mean_and_error((margins - theirs).mean(axis=1))
    followed = np.array([np.mean(unit.followed, axis=1) for unit in units])

    def leaked(is_first: bool) -> float | None:
        values = [unit.leaked for unit in units if unit.defence_first == is_first]
        return float(np.mean(values)) if values else None

    return InstructionSummary(
        cache=first.cache,
        pin=first.pin,
        policy=first.policy,
        budget=first.budget,
        rows=first.rows,
        capacity=first.capacity,
        samples=len(units),
        followed=float(followed.mean()),
        by_turn=tuple(float(value) for value in followed.mean(axis=0)),
        preferred=float((margins > 0).mean()),
        margin=float(margins.mean()),
        margin_to_full=difference[0],
        margin_to_full_error=difference[1],
        leaked=float(np.mean([unit.leaked for unit in units])),
        leaked_defence_first=leaked(True),
        leaked_defence_last=leaked(False),
        secret_leaked=float(np.mean([unit.secret_leaked for unit in units])),
    )


def _name(cache: EvalCache, pin: str, sample: int) -> str:
    return "/".join([cache.name, pin or "any", str(sample)])


def _title(cache: EvalCache, pin: str) -> str:
    return (
        f"{cache.name}, system prompt {'' if pin == 'system' else 'not '}pinned"
        if pin
        else cache.name
    )
