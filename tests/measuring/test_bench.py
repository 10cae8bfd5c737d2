"""Measuring caches side by side: what is compared, whose turn it is, and what the figures say."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needed import needed
from pyh2o.errors import MissingPackageError, ModelError, SettingsError
from pyh2o.measuring.caches import FULL_CACHE, Compute, MeasuredCache
from pyh2o.measuring.model import english_text, read_model, repeated_tokens
from pyh2o.measuring.speed import bandwidth, comparison, table, transformers_worker
from pyh2o.measuring.speed.caches import BenchSettings, caches_to_compare, default_histories
from pyh2o.measuring.speed.figures import (
    Basis,
    Figures,
    HistoryResult,
    Range,
    Report,
    as_csv,
    as_json,
    full_bytes,
    history_result,
)
from pyh2o.measuring.speed.messages import Command, Done, Generate, GoBack, KVUse, Read, Start
from pyh2o.measuring.speed.process import CacheFailedError, WorkerProcess
from pyh2o.measuring.speed.turns import (
    CacheRun,
    Reading,
    Round,
    StoppedEarly,
    Turns,
    generating_turns,
    reading_turns,
)
from pyh2o.system.machine import available_bytes, machine_facts
from quiet_progress import Quiet
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

TRAINED = 512

SETTINGS = BenchSettings(
    model=Path("tiny.gguf"),
    window=TRAINED,
    compute=Compute(threads=1),
    histories=(0, 300),
    budgets=(0.2, 64),
    kv_types=("f16", "q8_0"),
    rounds=3,
    n=4,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", seed=3, n_ctx_train=TRAINED
    )


# -------------------------------------------------------------------------------------------------
# What is compared
# -------------------------------------------------------------------------------------------------


def test_caches() -> None:
    caches = caches_to_compare(SETTINGS, TRAINED)
    assert [(cache.name, cache.rows, cache.cells) for cache in caches] == [
        ("full", 0, 512),
        ("full, flash attention", 0, 512),
        ("full, q8_0", 0, 512),
        ("20 %", 102, 256),
        ("20 %, q8_0", 102, 256),
        ("64 rows", 64, 256),
        ("64 rows, q8_0", 64, 256),
        ("sinks + window, 20 %", 102, 256),
        ("sinks + window, 64 rows", 64, 256),
        ("full at 102 rows", 0, 256),
        ("full at 102 rows, flash attention", 0, 256),
        ("full at 64 rows", 0, 256),
        ("full at 64 rows, flash attention", 0, 256),
    ]
    by_name = {cache.name: cache for cache in caches}
    assert [cache.name for cache in caches if cache.is_stock] == ["full", "full, flash attention"]
    half = by_name["64 rows"]
    assert (half.heavy, half.recent, half.pinned) == (32, 32, 0)
    sinks = by_name["sinks + window, 64 rows"]
    assert (sinks.heavy, sinks.recent, sinks.pinned) == (0, 60, 4)


def test_stock_modes_at_equal_cells_take_part_once_with_a_short_text() -> None:
    caches = {cache.name: cache for cache in caches_to_compare(SETTINGS, TRAINED)}
    equal = caches["full at 64 rows"]
    assert [equal.takes_part(history, 300) for history in (0, 300)] == [False, True]
    assert equal.target(300) == 64
    assert caches["full"].target(300) == 300


def test_budget_larger_than_the_text_has_no_equal_cells() -> None:
    short = replace(SETTINGS, histories=(0, 100))
    names = [cache.name for cache in caches_to_compare(short, TRAINED)]
    assert "full at 64 rows" in names
    assert "full at 102 rows" not in names


@pytest.mark.parametrize(("longest", "cells"), [(20, 2048), (2048, 2304), (5000, 5120)])
def test_full_caches_have_room_for_the_window_and_the_text(longest: int, cells: int) -> None:
    """However short the text is: a budget is a part of the window, and so is its cache."""
    settings = replace(SETTINGS, window=2048, histories=(longest,))
    caches = caches_to_compare(settings, 2048)
    full = [cache for cache in caches if cache.is_full and cache.text is None]
    assert [cache.cells for cache in full] == [cells] * 3
    assert all(cache.cells < cells for cache in caches if not cache.is_full)


def test_policies_are_compared_at_each_budget() -> None:
    settings = replace(SETTINGS, budgets=(64,), kv_types=("f16",), policies=("h2o", "tova"))
    caches = {cache.name: cache.policy for cache in caches_to_compare(settings, TRAINED)}
    assert caches["h2o, 64 rows"] == "h2o"
    assert caches["tova, 64 rows"] == "tova"
    # a window of its own needs no scores
    assert caches["sinks + window, 64 rows"] == "streaming"


def test_caches_of_transformers_and_kvpress() -> None:
    settings = replace(SETTINGS, transformers=True)
    stock = caches_to_compare(settings, TRAINED)
    both = caches_to_compare(settings, TRAINED, kvpress=True)
    assert [cache.kind for cache in stock[13:]] == ["transformers"]
    assert [(cache.kind, cache.rows) for cache in both[14:]] == [("kvpress", 102), ("kvpress", 64)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"histories": ()}, "at least one --history"),
        ({"histories": (-1,)}, "give 0 or more tokens"),
        ({"kv_types": ("f16", "q3_0")}, "no KV type 'q3_0'"),
        ({"histories": (4, 16)}, "4 and 16 are too close: 12 tokens"),
    ],
)
def test_refused_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(SETTINGS, **change)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1.5, "1.5 is more than the window"),
        (513, "513 is more than the window of 512"),
        (3, "no room for 4"),
    ],
)
def test_refused_budgets(budget: float, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        caches_to_compare(replace(SETTINGS, budgets=(budget,)), TRAINED)


def test_histories_that_are_just_far_enough_apart() -> None:
    assert replace(SETTINGS, histories=(0, 4, 17)).text_tokens == 17 + 12


def test_default_histories_fit_the_window() -> None:
    assert default_histories(131072, 160) == (0, 4096, 8192)
    assert default_histories(2048, 160) == (0, 1024, 2048)
    assert default_histories(256, 160) == (0, 256)


# -------------------------------------------------------------------------------------------------
# Turns
# -------------------------------------------------------------------------------------------------


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


def test_kvpress_reads_each_text_from_its_beginning() -> None:
    log: list[tuple[str, Command]] = []
    cache = MeasuredCache("k", "kvpress", cells=100, rows=5)
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


# -------------------------------------------------------------------------------------------------
# Figures
# -------------------------------------------------------------------------------------------------

MIB = 2**20
STOCK = replace(FULL_CACHE, cells=200)
FLASH = replace(STOCK, name="full, flash attention", flash_attention=True)
OURS = MeasuredCache("20 %", policy="h2o", cells=100, rows=40)
BASIS = Basis(full_bytes=8 * MIB, weight_bytes=3 * MIB, bytes_per_second=100 * MIB)


def run_of(cache: MeasuredCache, *seconds: float, **changes: Any) -> CacheRun:
    """Rounds of 10 tokens that take so long, over a MiB of rows; 30 tokens were read in 6 s."""
    rounds = tuple(Round(10, one, 1, 0.1, MIB) for one in seconds)
    run = CacheRun(cache, 30, (Reading(30, 30, 6.0),), rounds, KVUse(2 * MIB, 0, 100, 50), 7)
    return replace(run, **changes)


def figures_of(*runs: CacheRun, basis: Basis = BASIS) -> tuple[Figures, ...]:
    return history_result(30, runs, basis).figures


def test_figures() -> None:
    [figures] = figures_of(run_of(OURS, 1.0, 2.0, 4.0))
    assert figures == Figures(
        cache="20 %",
        position=30,
        kv_bytes=2 * MIB,
        share_of_full=0.25,
        peak_bytes=7,
        device_bytes=0,
        read_per_second=5.0,
        first_token_seconds=6.2,
        generated_per_second=Range(5.0, 2.5, 10.0),
        ratio=None,
        compactions=3,
        compaction_share=pytest.approx(0.3 / 7),
        compaction_seconds=pytest.approx(0.1),
        bytes_per_token=4 * MIB,
        roofline_per_second=25.0,
        roofline_share=0.2,
    )


def test_ratio_is_that_of_each_round_to_the_better_stock_mode() -> None:
    slow, fast, ours = figures_of(
        run_of(STOCK, 9.0, 9.0, 1.0), run_of(FLASH, 2.0, 4.0, 6.0), run_of(OURS, 1.0, 1.0, 2.0)
    )
    assert fast.ratio == Range(1.0, 1.0, 1.0)
    assert ours.ratio == Range(pytest.approx(3.0), pytest.approx(2.0), pytest.approx(4.0))
    assert slow.ratio == Range(pytest.approx(4 / 9), pytest.approx(2 / 9), pytest.approx(6.0))


def test_q8_and_short_texts_are_no_measure_for_others() -> None:
    q8 = replace(STOCK, name="full, q8_0", kv_type="q8_0")
    short = replace(STOCK, name="full at 40 rows", cells=100, text=40)
    *_, ours = figures_of(
        run_of(STOCK, 4.0), run_of(q8, 1.0), run_of(short, 1.0), run_of(OURS, 2.0)
    )
    assert ours.ratio == Range(2.0, 2.0, 2.0)


def test_tokens_that_need_not_be_read_again_count_for_the_first_token() -> None:
    readings = (Reading(10, 10, 2.0), Reading(20, 15, 3.0))
    [figures] = figures_of(run_of(OURS, 1.0, readings=readings))
    assert figures.first_token_seconds == pytest.approx(2.0 + 4.0 + 0.1)
    assert figures.read_per_second == 5.0


def test_figures_that_there_are_not() -> None:
    rounds = (Round(10, 1.0, 0, 0.0, MIB),)
    basis = replace(BASIS, bytes_per_second=None)
    [figures] = figures_of(run_of(OURS, readings=(), rounds=rounds), basis=basis)
    assert figures.read_per_second is None
    assert figures.first_token_seconds == 0.1
    assert figures.compaction_seconds is None
    assert figures.roofline_per_second is None
    assert figures.roofline_share is None


@pytest.mark.parametrize(("kv_type", "per_cell"), [("f16", 2), ("f32", 4), ("q8_0", 34 / 32)])
def test_full_bytes_from_any_cache(kv_type: str, per_cell: float) -> None:
    use = KVUse(round(per_cell * 3200), 999, 100, 0)
    assert full_bytes(use, kv_type, 1000) == 2 * 32 * 1000


def report() -> Report:
    """Two caches at two histories; the third was given up."""
    lost = MeasuredCache("10 %", policy="h2o", cells=100)
    runs = [run_of(STOCK, 2.0, 4.0), run_of(OURS, 1.0, 1.0)]
    return Report(
        machine={
            "cpu": "a processor",
            "threads": 1,
            "model": "tiny.gguf",
            "model_file_bytes": 2_000_000,
            "pyh2o": "1.0",
            "llama_cpp_commit": "abc",
            "gpus": [],
        },
        settings={"histories": [0, 30], "rounds": 2, "n": 10, "window": 200},
        basis=BASIS,
        caches=(STOCK, OURS, lost),
        histories=(
            history_result(0, [replace(run, readings=()) for run in runs], BASIS),
            history_result(30, runs, BASIS),
        ),
        failures=(("10 %", "it fell over"),),
        notes=("a note",),
        complete=True,
    )


def test_json_has_the_rounds_and_csv_the_same_figures() -> None:
    data = json.loads(as_json(report()))
    lines = list(csv.DictReader(io.StringIO(as_csv(report()))))
    assert data["failures"] == {"10 %": "it fell over"}
    figures = [
        {"history": history["history"], **figures}
        for history in data["histories"]
        for figures in history["figures"]
    ]
    assert len(figures) == len(lines) == 4
    assert figures[3]["rounds"][0]["seconds"] == 1.0
    for one, line in zip(figures, lines, strict=True):
        assert int(line["history"]) == one["history"]
        assert line["cache"] == one["cache"]
        assert float(line["ratio"]) == one["ratio"]["median"]
        assert float(line["generated_per_second_high"]) == one["generated_per_second"]["high"]
        assert line["read_per_second"] == ("" if one["history"] == 0 else "5.0")


def test_markdown() -> None:
    whole = report()
    text = table.history_table(whole, whole.histories[1]).markdown()
    assert text == (
        "**After 30 tokens of text**\n"
        "\n"
        "| cache | KV memory | of full | peak MiB | read tok/s | first token s | generate tok/s "
        "(range) | x full (range) | compactions, % of time | of roofline |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        "| full | 2.0 MiB | 25.0% | 0 | 5 | 6.27 | 3.8 (2.5-5.0) | 1.00 (1.00-1.00) | 2, 3.3% "
        "| 15% |\n"
        "| 20 % | 2.0 MiB | 25.0% | 0 | 5 | 6.10 | 10.0 (10.0-10.0) | 3.00 (2.00-4.00) "
        "| 2, 10.0% | 40% |\n"
        "| 10 % |  |  |  |  |  |  |  |  |  |\n"
        "\n"
        "10 %: it fell over\n"
        "\n"
        "a note\n"
    )


def test_a_gpu_has_a_column_and_a_name() -> None:
    whole = report()
    on_gpu = run_of(OURS, 1.0, use=KVUse(2 * MIB, 0, 100, 50, bytes_device=9 * MIB))
    shown = table.history_table(whole, history_result(30, [on_gpu], BASIS))
    assert dict(zip(shown.headings, shown.rows[1], strict=True))["GPU MiB"] == "9"
    named = replace(whole, machine={**whole.machine, "gpus": ["a card"]})
    assert " · a card · tiny.gguf" in table.head(named)


def test_title_says_what_is_missing() -> None:
    whole = report()
    started = replace(whole, settings={**whole.settings, "rounds": 5})
    title = table.title(started, whole.histories[1])
    assert title == "After 30 tokens of text, stopped after 2 of 5 rounds"
    assert table.title(whole, HistoryResult(30, (), ())) == "After 30 tokens of text"


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture(kind: str, start: bytes) -> None:
    needed("matplotlib")
    from pyh2o.measuring.speed.plot import picture

    data = picture(report(), kind)
    assert data.startswith(start)
    if kind == "svg":
        # Text is drawn as outlines, but each has its words in a comment.
        assert data.count(b"<!-- full -->") == 2
        assert data.count(b"<!-- 20 % -->") == 2
        assert b"<!-- 10 % -->" not in data


# -------------------------------------------------------------------------------------------------
# The machine, the model and the text
# -------------------------------------------------------------------------------------------------


def test_bandwidth_is_measured() -> None:
    assert bandwidth.bytes_per_second(2, size=1 << 20, tries=2) > 0


def test_machine_facts() -> None:
    facts = machine_facts(3)
    assert facts["threads"] == 3
    assert facts["cpu"]
    assert facts["llama_cpp_commit"]
    available = available_bytes()
    assert available is None or available > 0


def test_model_and_text(path: Path) -> None:
    facts = read_model(path)
    with tiny_llama(path, n_ctx=TRAINED, evict=False) as llm:
        expected = llm.tokenize(b"one text. ")
        again = llm.tokenize(b"one text. ", add_bos=False)
    assert facts.n_ctx_train == TRAINED
    assert facts.weight_bytes < facts.file_bytes == path.stat().st_size
    tokens = repeated_tokens(path, "one text. ", len(expected) + 2 * len(again))
    assert list(tokens) == [*expected, *again, *again]
    assert repeated_tokens(path, "one text. ", 3) == tuple(expected[:3])
    assert len(english_text()) > 100_000


def test_file_that_is_no_model(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    with pytest.raises(ModelError, match="there is no model file"):
        read_model(wrong)
    wrong.write_text("no model")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_model(wrong)


# -------------------------------------------------------------------------------------------------
# Processes
# -------------------------------------------------------------------------------------------------


def started(path: Path, cache: MeasuredCache, n_tokens: int = 320) -> Start:
    tokens = repeated_tokens(path, "Once upon a time there was a clockmaker. ", n_tokens)
    return Start(cache, path, TRAINED, Compute(threads=1), tokens)


def test_worker_evicts_as_the_library_does(path: Path) -> None:
    cache = MeasuredCache("12 %", policy="h2o-far", cells=256, heavy=32, recent=32, rows=64)
    start = started(path, cache)
    with closing(WorkerProcess(start)) as worker:
        assert worker.ready.use.used == 0  # the warm-up is forgotten
        read = worker.ask(Read(300, last=True))
        generated = worker.ask(Generate(4))
        back = worker.ask(GoBack(10))
    with tiny_llama(path, n_ctx=TRAINED, hh=32, recent=32) as llm:
        llm.eval(start.tokens[:300])
        kv = llm.kv
    assert (read.position, generated.position, back.position) == (300, 304, 304)
    assert (read.after.cells, read.after.used) == (kv.cells, kv.used)
    assert read.after.compactions == kv.compactions > 0
    assert read.after.bytes_total == kv.bytes_total
    assert read.seconds > 0
    assert generated.before == read.after
    assert generated.peak_bytes > read.after.bytes_total
    assert worker.ready.own_bytes > 0 or not Path("/proc").exists()


def test_full_worker_goes_back(path: Path) -> None:
    with closing(WorkerProcess(started(path, replace(FULL_CACHE, cells=512)))) as worker:
        worker.ask(Read(300, last=True))
        assert worker.ask(GoBack(10)).position == 10
        assert worker.ask(Generate(2)).after.used == 12
        assert worker.ask(GoBack(0)).after.used == 0


def test_refused_cache_gives_the_reason(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", seed=1, arch_variant="alibi")
    cache = MeasuredCache("20 %", policy="h2o-far", cells=256, heavy=32, recent=32, rows=64)
    with pytest.raises(CacheFailedError, match=r"^20 %: eviction cannot be used .*ALiBi"):
        WorkerProcess(Start(cache, path, 512, Compute(threads=1), (1, 5, 6)))


def test_worker_that_is_killed_gives_a_reason(path: Path) -> None:
    with closing(WorkerProcess(started(path, replace(FULL_CACHE, cells=512)))) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(CacheFailedError, match="full: its process was ended by signal 9"):
            worker.ask(Generate(1))


def test_worker_ends_with_its_context(path: Path) -> None:
    with closing(WorkerProcess(started(path, replace(FULL_CACHE, cells=512)))) as worker:
        pid = worker.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_memory_that_is_not_there_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "bytes_per_second", lambda threads: 1e9)
    monkeypatch.setattr(comparison, "available_bytes", lambda: 2**20)
    settings = replace(SETTINGS, model=path)
    facts = read_model(path)
    caches = caches_to_compare(settings, TRAINED)
    tokens = repeated_tokens(path, "a text ", settings.text_tokens)
    progress = Quiet()
    with closing(comparison.Comparison(settings, facts, caches, tokens, progress)) as compared:
        with pytest.raises(SettingsError, match=r"GiB more and 0\.0 GiB are available: lower"):
            compared.start()
        # The announcement is what the caches would really have taken.
        rows_of_cell, scores_of_cell = 3 * 2 * 2 * 32 * 2, 3 * 2 * 4
        expected = sum(
            cache.cells * rows_of_cell * (34 / 64 if cache.kv_type == "q8_0" else 1)
            + cache.cells * scores_of_cell * (cache.kind == "evicting")
            for cache in caches
        )
        [note] = progress.notes
        said = re.match(r"the caches take ([\d.]+) MiB, and .*; 0\.00 GiB are available$", note)
        assert said is not None
        assert float(said[1]) == pytest.approx(expected / 2**20, abs=0.06)


@pytest.mark.parametrize("longest", [TRAINED, TRAINED + 1])
def test_histories_beyond_the_trained_context_are_noted(path: Path, longest: int) -> None:
    settings = replace(SETTINGS, model=path, histories=(0, longest))
    report = comparison.Comparison(settings, read_model(path), [], (), Quiet()).report
    assert len(report.notes) == (longest > TRAINED)
    assert all(
        "more than 512 tokens are beyond what the model was" in note for note in report.notes
    )


# -------------------------------------------------------------------------------------------------
# Transformers
# -------------------------------------------------------------------------------------------------


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_worker, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"torch.*pip install 'pyh2o-llm\[compare\]'"):
        transformers_worker.check_packages()
    assert not transformers_worker.has_kvpress()


def tiny_transformer() -> Any:
    transformers = needed("transformers", install="'.[compare]'")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_transformers_cache_holds_the_whole_text() -> None:
    model = transformers_worker.TransformersModel(tiny_transformer())
    model.read(range(20), last=False)
    model.read(range(20), last=True)
    model.generate(7)
    assert model.position == 41
    assert model.use() == KVUse(41 * 2 * 2 * 32 * 4, 0, 41, 41)
    model.go_back(30)
    model.generate(7)
    assert (model.position, model.use().used) == (31, 31)


def test_kvpress_drops_rows_when_the_prompt_is_read() -> None:
    needed("kvpress", install="kvpress")
    model = transformers_worker.KVPressModel(tiny_transformer(), rows=25)
    model.read(range(30), last=False)
    assert (model.position, model.use().used) == (30, 0)
    model.read(range(70), last=True)
    assert (model.position, model.use().used) == (100, 25)
    model.generate(7)
    assert (model.position, model.use().used) == (101, 26)
    model.go_back(0)
    assert (model.position, model.use().used) == (0, 0)
