"""Measures caches in turns: only one computes at any time.

In each round (`rounds.py`) every cache has one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .process import Action, Cache, CacheFailedError, Measurement, Worker
from .rounds import Range, interleaved

# Maximum tokens read in a turn.
CHUNK = 1024
# Tokens of a trial: as a prompt, and one at a time.
TRIED_PROMPT, TRIED = 64, 4


@dataclass(frozen=True)
class Figures:
    """One cache at one history.

    Attributes:
        done: last result of its process.
        read_per_second: tokens read per second since the last history; None if none were read.
        first_token_seconds: time from an empty cache to the first token after this history.
        ratio: speed relative to the faster full cache in the same round; None without one.
        compactions, compaction_share: number of compactions in all rounds, and their share of the
            time.
    """

    cache: str
    is_full: bool
    done: Measurement
    read_per_second: float | None
    first_token_seconds: float
    generated_per_second: Range
    ratio: Range | None
    compactions: int
    compaction_share: float


class _Measured:
    def __init__(self, cache: Cache, worker: Worker) -> None:
        self.cache = cache
        self.worker = worker
        self.last = worker.ready
        self.reading = self.stretch = (0, 0.0)  # tokens and seconds: in all, of the last stretch
        self.start = worker.ready  # before the first round
        self.rounds: list[float] = []  # seconds

    def target(self, history: int) -> int:
        return history if self.cache.text is None else self.cache.text

    def speeds(self, n: int) -> list[float]:
        return [n / seconds for seconds in self.rounds]

    def figures(self, n: int, full: Sequence[float]) -> Figures:
        before, after, speeds = self.start.use, self.last.use, self.speeds(n)
        (n_read, seconds), (n_last, seconds_last) = self.reading, self.stretch
        # Tokens generated at shorter histories are counted at the speed of the tokens read.
        reading = seconds * self.start.position / n_read if n_read else 0.0
        compacting = after.compaction_seconds - before.compaction_seconds
        return Figures(
            cache=self.cache.name,
            is_full=self.cache.is_full,
            done=self.last,
            read_per_second=n_last / seconds_last if n_last else None,
            first_token_seconds=reading + 1 / median(speeds),
            generated_per_second=Range.of(speeds),
            ratio=Range.of_ratios(speeds, full),
            compactions=after.compactions - before.compactions,
            compaction_share=compacting / sum(self.rounds),
        )


class Turns:
    """Caches that read and generate in turns, each in a child process."""

    def __init__(
        self,
        caches: Sequence[Cache],
        model: Path,
        tokens: Sequence[int],
        on_turn: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Start the processes, in the order of the first round.

        `on_turn` is called with the name of a cache after its start and after each of its turns.
        """
        self.failures: dict[str, str] = {}
        self._on_turn = on_turn
        self._all: list[_Measured] = []
        try:
            for cache in caches:
                try:
                    self._all.append(_Measured(cache, Worker(cache, model, tokens)))
                except CacheFailedError as error:
                    self.failures[cache.name] = str(error)
                on_turn(cache.name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for one in self._all:
            one.worker.close()

    def expected_seconds(self, histories: Sequence[int], *, rounds: int, n: int) -> float:
        """Estimate the duration of `measure` by a short trial of each cache.

        Too low if attention to a long text dominates.
        """
        to_do: list[tuple[Action, int, int]] = [
            ("end", TRIED_PROMPT, histories[-1]),
            ("generate", TRIED, rounds * n * len(histories)),
        ]
        total = 0.0
        for one in self._all:
            for action, n_tried, n_all in to_do:
                if self._ask(one, action, n_tried):
                    total += one.last.seconds / n_tried * n_all
            self._ask(one, "reset")
        return total

    def measure(
        self, histories: Sequence[int], *, rounds: int, n: int
    ) -> Iterator[tuple[int, list[Figures]]]:
        """Read up to each history and generate after it.

        Args:
            histories: ascending; each longer than the previous one plus the generated tokens.

        Yields:
            A history, and the figures of all caches that have not failed.
        """
        for history in histories:
            own = [one for one in self._all if one.cache.text is None or history == histories[-1]]
            self._read(own, history)
            for one in own:
                one.start, one.rounds = one.last, []
            for one in interleaved(own, rounds):
                if self._ask(one, "generate", n):
                    one.rounds.append(one.last.seconds)
            alive = [one for one in own if one.cache.name not in self.failures]
            full = [one.speeds(n) for one in alive if one.cache.is_full]
            yield history, [one.figures(n, max(full, key=median, default=[])) for one in alive]

    def _read(self, own: Sequence[_Measured], history: int) -> None:
        for one in own:
            one.stretch = (0, 0.0)
            if one.cache.at_once and one.last.position and self._ask(one, "reset"):
                one.reading = (0, 0.0)
        reading = own
        while reading:
            for one in reading:
                left = one.target(history) - one.last.position
                chunk = min(CHUNK, left)
                if chunk > 0 and self._ask(one, "read" if chunk < left else "end", chunk):
                    took = one.last.seconds
                    one.stretch = (one.stretch[0] + chunk, one.stretch[1] + took)
                    one.reading = (one.reading[0] + chunk, one.reading[1] + took)
            reading = [
                one
                for one in reading
                if one.cache.name not in self.failures and one.last.position < one.target(history)
            ]

    def _ask(self, one: _Measured, action: Action, n: int = 0) -> bool:
        """Run an action of a cache; return False if the cache has failed, now or before."""
        if one.cache.name in self.failures:
            return False
        try:
            one.last = one.worker.ask(action, n)
        except CacheFailedError as error:
            self.failures[one.cache.name] = str(error)
            one.worker.close()
            return False
        self._on_turn(one.cache.name)
        return True
