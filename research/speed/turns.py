"""Who does what when: only one cache computes at any time, and all of them take turns.

A machine's speed drifts with its temperature and with what else runs on it. Turns by turns, the
drift meets all caches, and the rounds of two caches can be compared one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..eval.caches import MeasuredCache
from .messages import Command, Done, Generate, GoBack, KVUse, Read
from .process import CacheFailedError

# A text is read in at least so many turns, and in turns of at most so many tokens.
LEAST_PIECES = 3
LARGEST_PIECE = 2048

# Told after each turn: the cache, what it did ("reads" or "generates"), and how many tokens.
OnTurn = Callable[[MeasuredCache, str, int], None]


@dataclass(frozen=True)
class Reading:
    """One stretch of text, up to a history.

    Attributes:
        stretch: tokens from the history before to this one.
        tokens: those that were read now; a cache that could not go back has the others already.
        seconds: of all pieces.
    """

    stretch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Round:
    """One turn of generating.

    Attributes:
        tokens: generated.
        seconds: that took.
        compactions: while it lasted.
        compaction_seconds: of these seconds.
        bytes_in_use: rows and scores that attention read for a token, on average.
    """

    tokens: int
    seconds: float
    compactions: int
    compaction_seconds: float
    bytes_in_use: float


@dataclass(frozen=True)
class CacheRun:
    """All that was measured of one cache at one history.

    Attributes:
        cache: which.
        position: tokens of its text before the first round.
        readings: stretches read so far, the last one up to this history; none for history 0.
        rounds: as many as for all other caches.
        use: the cache after the last round.
        peak_bytes: most memory of its process so far.
    """

    cache: MeasuredCache
    position: int
    readings: tuple[Reading, ...]
    rounds: tuple[Round, ...]
    use: KVUse
    peak_bytes: int


class StoppedEarly(KeyboardInterrupt):
    """Ctrl-C between the rounds of a history; `runs` is what all caches have done of it."""

    def __init__(self, runs: list[CacheRun]) -> None:
        super().__init__()
        self.runs = runs


class Worker(Protocol):
    """What can be told to do something."""

    def ask(self, command: Command) -> Done:
        """Do it."""

    def close(self) -> None:
        """Give everything back."""


class _Player:
    """A cache, its worker and what was measured."""

    def __init__(self, cache: MeasuredCache, worker: Worker) -> None:
        self.cache = cache
        self.worker = worker
        self.position = 0
        self.target = 0  # tokens of the stretch before
        self.start = 0
        self.readings: list[Reading] = []
        self.rounds: list[Round] = []
        self.last: Done | None = None

    def ask(self, command: Command) -> Done:
        done = self.worker.ask(command)
        self.position = done.position
        self.last = done
        return done

    def run(self, n_rounds: int) -> CacheRun:
        assert self.last is not None
        return CacheRun(
            cache=self.cache,
            position=self.start,
            readings=tuple(self.readings),
            rounds=tuple(self.rounds[:n_rounds]),
            use=self.last.after,
            peak_bytes=self.last.peak_bytes,
        )


class Turns:
    """Lets caches read and generate by turns.

    Attributes:
        failures: name and reason of each cache that had to be given up.
    """

    def __init__(
        self,
        workers: Sequence[tuple[MeasuredCache, Worker]],
        *,
        longest: int,
        rounds: int,
        n: int,
        pause: float = 0.0,
        on_turn: OnTurn = lambda cache, action, tokens: None,
    ) -> None:
        """Nothing is measured yet.

        Args:
            workers: the caches and who runs them, in the order of the first round.
            longest: the last history.
            rounds: turns of generating at each history.
            n: tokens generated in a turn.
            pause: seconds between two turns.
            on_turn: called after each turn.
        """
        self.failures: dict[str, str] = {}
        self._players = [_Player(cache, worker) for cache, worker in workers]
        self._longest = longest
        self._n_rounds = rounds
        self._n = n
        self._pause = pause
        self._on_turn = on_turn

    def measure(self, history: int) -> list[CacheRun]:
        """Read up to a history, and generate after it.

        Args:
            history: tokens; larger than that of the call before.

        Raises:
            StoppedEarly: Ctrl-C, after at least one round.
            KeyboardInterrupt: Ctrl-C before that.
        """
        playing = [
            player
            for player in self._players
            if player.cache.takes_part(history, self._longest)
            and player.cache.name not in self.failures
        ]
        self._read(playing, history)
        for player in playing:
            player.rounds = []
            player.start = player.position
        try:
            self._generate(playing)
        except KeyboardInterrupt:
            done = min((len(player.rounds) for player in self._alive(playing)), default=0)
            if done:
                raise StoppedEarly(self._runs(playing, done)) from None
            raise
        runs = self._runs(playing, self._n_rounds)
        if history < self._longest:
            self._go_back(playing)
        return runs

    def _runs(self, playing: Sequence[_Player], n_rounds: int) -> list[CacheRun]:
        return [player.run(n_rounds) for player in self._alive(playing)]

    def _read(self, playing: Sequence[_Player], history: int) -> None:
        for player in playing:
            if player.cache.reads_at_once and player.position:
                self._turn(player, GoBack(0), "", 0)
                player.target = 0
                player.readings = []
        before = [player.position for player in playing]
        seconds = [0.0] * len(playing)
        left = [player.cache.target(history) - player.position for player in playing]
        for index, tokens, last in reading_turns(left):
            player = playing[index]
            done = self._turn(player, Read(tokens, last), "reads", tokens)
            if done is not None:
                seconds[index] += done.seconds
        for player, start, taken in zip(playing, before, seconds, strict=True):
            target = player.cache.target(history)
            if target > player.target:
                stretch = target - player.target
                player.readings.append(Reading(stretch, player.position - start, taken))
                player.target = target

    def _generate(self, playing: Sequence[_Player]) -> None:
        for _, index in generating_turns(len(playing), self._n_rounds):
            player = playing[index]
            done = self._turn(player, Generate(self._n), "generates", self._n)
            if done is not None:
                player.rounds.append(_round(done, self._n))

    def _go_back(self, playing: Sequence[_Player]) -> None:
        for player in self._alive(playing):
            self._turn(player, GoBack(player.start), "", 0)

    def _turn(self, player: _Player, command: Command, action: str, tokens: int) -> Done | None:
        """Let a cache do something; None if it was given up, now or before."""
        done = None
        if player.cache.name not in self.failures:
            time.sleep(self._pause)
            try:
                done = player.ask(command)
            except CacheFailedError as error:
                self.failures[error.name] = error.reason
                player.worker.close()
        if tokens:
            self._on_turn(player.cache, action, tokens)
        return done

    def _alive(self, players: Sequence[_Player]) -> list[_Player]:
        return [player for player in players if player.cache.name not in self.failures]


def reading_turns(left: Sequence[int]) -> list[tuple[int, int, bool]]:
    """The order in which caches read what each of them has left.

    Args:
        left: tokens of each cache.

    Returns:
        (index of the cache, tokens, whether they are its last), in the order of the turns. Each
        cache's tokens are split evenly into the same number of pieces, at least one token each.
    """
    pieces = max(LEAST_PIECES, math.ceil(max(left, default=0) / LARGEST_PIECE))
    turns = []
    for piece in range(pieces):
        for index, tokens in enumerate(left):
            parts = min(pieces, tokens)
            if piece < parts:
                size = tokens * (piece + 1) // parts - tokens * piece // parts
                turns.append((index, size, piece == parts - 1))
    return turns


def generating_turns(n_caches: int, rounds: int) -> list[tuple[int, int]]:
    """(round, index of the cache) in the order of the turns: every second round is reversed."""
    forth = range(n_caches)
    return [
        (number, index)
        for number in range(rounds)
        for index in (forth if number % 2 == 0 else reversed(forth))
    ]


def _round(done: Done, n: int) -> Round:
    return Round(
        tokens=n,
        seconds=done.seconds,
        compactions=done.after.compactions - done.before.compactions,
        compaction_seconds=done.after.compaction_seconds - done.before.compaction_seconds,
        bytes_in_use=(done.before.bytes_in_use + done.after.bytes_in_use) / 2,
    )
