"""Whose turn it is: reading, generating, going back, and caches that are given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from research.eval.caches import FULL_CACHE, Kind, MeasuredCache
from research.speed.messages import Command, Done, Generate, GoBack, KVUse, Read
from research.speed.process import CacheFailedError
from research.speed.turns import (
    Reading,
    StoppedEarly,
    Turns,
    generating_turns,
    reading_turns,
)


def test_pieces_are_read_by_turns(rng: np.random.Generator) -> None:
    left = [int(n) for n in rng.choice([0, 1, 2, 3, 10, 4096, 9000], size=5)]
    turns = reading_turns(left)
    for index, n_left in enumerate(left):
        pieces = [(tokens, last) for i, tokens, last in turns if i == index]
        assert sum(tokens for tokens, _ in pieces) == n_left
        assert all(tokens > 0 for tokens, _ in pieces)
        assert len(pieces) >= min(3, n_left)
        assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


def test_order_of_reading() -> None:
    assert reading_turns([7, 1, 3]) == [
        (0, 2, False),
        (1, 1, True),
        (2, 1, False),
        (0, 2, False),
        (2, 1, False),
        (0, 3, True),
        (2, 1, True),
    ]
    assert reading_turns([0, 0]) == []


def test_every_second_round_is_reversed() -> None:
    assert generating_turns(2, 3) == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]


class FakeWorker:
    """Takes a second for a token; a cache that cannot go back has `evicted`."""

    def __init__(self, name: str, log: list[tuple[str, Command]], *, evicted: bool = False) -> None:
        self.name = name
        self.log = log
        self.evicted = evicted
        self.position = 0
        self.dies_at = -1
        self.closed = False

    def ask(self, command: Command) -> Done:
        self.log.append((self.name, command))
        before = self._use()
        seconds = 0.0
        if isinstance(command, GoBack):
            if not self.evicted or command.position == 0:
                self.position = command.position
        else:
            self.position += command.tokens
            seconds = float(command.tokens)
        if 0 <= self.dies_at <= self.position:
            raise CacheFailedError(self.name, "it fell over")
        return Done(seconds, self.position, before, self._use(), peak_bytes=100)

    def close(self) -> None:
        self.closed = True

    def _use(self) -> KVUse:
        return KVUse(1000, 0, 100, min(self.position, 100), self.position // 10, 0.0)


def fakes(
    *names: str, evicted: str = ""
) -> tuple[
    dict[str, FakeWorker], list[tuple[MeasuredCache, FakeWorker]], list[tuple[str, Command]]
]:
    log: list[tuple[str, Command]] = []
    workers = {name: FakeWorker(name, log, evicted=name == evicted) for name in names}
    return workers, [(replace(FULL_CACHE, name=name), workers[name]) for name in names], log


def test_all_caches_take_turns_and_go_back() -> None:
    _, pairs, log = fakes("a", "b")
    turns = Turns(pairs, longest=6, rounds=2, n=2)
    first = turns.measure(3)
    last = turns.measure(6)
    one_turn = [("a", Read(1)), ("b", Read(1))]
    end = [("a", Read(1, last=True)), ("b", Read(1, last=True))]
    rounds = [("a", Generate(2)), ("b", Generate(2)), ("b", Generate(2)), ("a", Generate(2))]
    history = [*one_turn, *one_turn, *end, *rounds]
    assert log == [*history, ("a", GoBack(3)), ("b", GoBack(3)), *history]
    assert [run.position for run in first + last] == [3, 3, 6, 6]
    assert first[0].readings == (Reading(3, 3, 3.0),)
    assert last[0].readings == (Reading(3, 3, 3.0), Reading(3, 3, 3.0))
    assert [one.seconds for one in last[1].rounds] == [2.0, 2.0]


def test_cache_that_cannot_go_back_goes_on() -> None:
    _, pairs, _ = fakes("a", "b", evicted="b")
    turns = Turns(pairs, longest=10, rounds=2, n=2)
    turns.measure(3)
    back, on = turns.measure(10)
    assert back.readings[-1] == Reading(7, 7, 7.0)
    assert on.readings[-1] == Reading(7, 3, 3.0)
    assert (back.position, on.position) == (10, 10)


@pytest.mark.parametrize("kind", ["kvpress", "openvino"])
def test_text_that_is_read_at_once_is_read_from_its_beginning(kind: Kind) -> None:
    log: list[tuple[str, Command]] = []
    cache = MeasuredCache("k", kind, cells=100, rows=5)
    turns = Turns([(cache, FakeWorker("k", log, evicted=True))], longest=9, rounds=1, n=1)
    turns.measure(3)
    [run] = turns.measure(9)
    assert run.readings == (Reading(9, 9, 9.0),)
    assert log[-5:-1] == [("k", GoBack(0)), *[("k", Read(3))] * 2, ("k", Read(3, last=True))]


def test_cache_that_fails_is_given_up_and_the_others_go_on() -> None:
    workers, pairs, log = fakes("a", "b", "c")
    workers["b"].dies_at = 5  # in its first round
    turns = Turns(pairs, longest=9, rounds=2, n=2)
    assert [run.cache.name for run in turns.measure(3)] == ["a", "c"]
    assert turns.failures == {"b": "it fell over"}
    assert workers["b"].closed
    log.clear()
    assert [run.cache.name for run in turns.measure(9)] == ["a", "c"]
    assert {name for name, _ in log} == {"a", "c"}


def interrupt_after(n_turns: int) -> Callable[[MeasuredCache, str, int], None]:
    seen: list[str] = []

    def on_turn(cache: MeasuredCache, action: str, tokens: int) -> None:
        seen.append(cache.name)
        if len(seen) == n_turns:
            raise KeyboardInterrupt

    return on_turn


def test_ctrl_c_keeps_the_rounds_that_all_caches_have_done() -> None:
    _, pairs, _ = fakes("a", "b")
    turns = Turns(pairs, longest=0, rounds=3, n=2, on_turn=interrupt_after(4))
    # It came between the fourth turn and its record.
    with pytest.raises(StoppedEarly) as stopped:
        turns.measure(0)
    assert [len(run.rounds) for run in stopped.value.runs] == [1, 1]


def test_ctrl_c_before_the_first_round_keeps_nothing_of_this_history() -> None:
    _, pairs, _ = fakes("a", "b")
    with pytest.raises(KeyboardInterrupt) as stopped:
        Turns(pairs, longest=9, rounds=3, n=2, on_turn=interrupt_after(2)).measure(9)
    assert not isinstance(stopped.value, StoppedEarly)
