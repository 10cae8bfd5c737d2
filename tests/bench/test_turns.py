"""Whose turn it is: reading, generating, and caches that are given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pyh2o.bench import turns as turns_module
from pyh2o.bench.process import Action, Cache, CacheFailedError, Measurement, Use
from pyh2o.bench.turns import Figures, Turns

Log = list[tuple[str, Action, int]]
Measured = Callable[..., tuple[list[list[Figures]], Turns, Log]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Figures at each history, of caches that take a second for a token; c takes two."""
    log: Log = []

    class FakeWorker:
        def __init__(self, cache: Cache, model: Path, tokens: Sequence[int]) -> None:
            self.cache = cache
            self.position = 0
            self.ready = self._done(0.0)
            if cache.settings.get("refused"):
                raise CacheFailedError("refused")

        def ask(self, action: Action, n: int = 0) -> Measurement:
            log.append((self.cache.name, action, n))
            self.position = 0 if action == "reset" else self.position + n
            if self.position >= self.cache.settings.get("dies_at", 1000):
                raise CacheFailedError("it fell over")
            return self._done(n * (2.0 if self.cache.name == "c" else 1.0))

        def close(self) -> None:
            log.append((self.cache.name, "close", 0))  # type: ignore[arg-type]

        def _done(self, seconds: float) -> Measurement:
            use = Use(1000, 100, self.position, compactions=self.position // 4)
            return Measurement(seconds, self.position, use, peak_bytes=100)

    def run(
        caches: list[Cache], histories: list[int], rounds: int = 2
    ) -> tuple[list[list[Figures]], Turns, Log]:
        turns = Turns(caches, Path("a.gguf"), range(100))
        found = [figures for _, figures in turns.measure(histories, rounds=rounds, n=2)]
        return found, turns, log

    monkeypatch.setattr(turns_module, "Worker", FakeWorker)
    monkeypatch.setattr(turns_module, "CHUNK", 2)
    return run


def test_all_caches_take_turns(measured: Measured) -> None:
    (first, last), _, log = measured([Cache("a"), Cache("b")], [3, 9])
    rounds = [("a", "generate", 2), ("b", "generate", 2)]
    rounds += reversed(rounds)
    reading = [("a", "read", 2), ("b", "read", 2), ("a", "end", 1), ("b", "end", 1)]
    assert log == [*reading, *rounds, ("a", "end", 2), ("b", "end", 2), *rounds]
    assert [one.cache for one in first + last] == ["a", "b"] * 2
    assert first[0].read_per_second == last[0].read_per_second == 1.0
    # 9 tokens, of which 4 were generated, and the first one
    assert (first[0].first_token_seconds, last[0].first_token_seconds) == (4.0, 10.0)
    assert first[0].ratio is None
    assert (last[0].compactions, last[0].done.position) == (1, 13)


def test_ratio_is_that_of_the_same_round(
    measured: Measured,
) -> None:
    caches = [Cache("a", is_full=True), Cache("b"), Cache("c", is_full=True)]
    ((a, b, c),), _, _ = measured(caches, [0])
    assert [one.ratio and one.ratio.median for one in (a, b, c)] == [1.0, 1.0, 0.5]
    assert f"{c.generated_per_second:.1f}" == "0.5 (0.5-0.5)"
    assert (a.read_per_second, a.first_token_seconds) == (None, 1.0)


def test_short_text_is_read_at_the_longest_history_only(
    measured: Measured,
) -> None:
    (first, last), _, log = measured([Cache("a"), Cache("b", text=4)], [0, 20])
    assert [[one.cache for one in figures] for figures in (first, last)] == [["a"], ["a", "b"]]
    assert [n for name, action, n in log if name == "b" and action != "generate"] == [2, 2]


def test_text_that_is_read_at_once_is_read_from_its_beginning(
    measured: Measured,
) -> None:
    (_, (last,)), _, log = measured([Cache("a", at_once=True)], [3, 9], rounds=1)
    after_first = log[log.index(("a", "generate", 2)) + 1 :]
    assert after_first[:-1] == [("a", "reset", 0), *[("a", "read", 2)] * 4, ("a", "end", 1)]
    assert last.first_token_seconds == 10.0


def test_cache_that_fails_is_given_up_and_the_others_go_on(
    measured: Measured,
) -> None:
    caches = [Cache("a"), Cache("b", {"dies_at": 5}), Cache("r", {"refused": True})]
    found, turns, log = measured(caches, [3, 9])
    assert [[one.cache for one in figures] for figures in found] == [["a"], ["a"]]
    assert turns.failures == {"b": "it fell over", "r": "refused"}
    assert ("b", "close", 0) in log
    assert log.count(("b", "generate", 2)) == 1
