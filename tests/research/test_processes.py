"""Caches in processes of their own."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from measured import TRAINED, Quiet
from pyh2o.errors import SettingsError
from research.eval.caches import FULL_CACHE, Compute, MeasuredCache
from research.eval.model import read_model, repeated_tokens
from research.speed import bandwidth, comparison
from research.speed.caches import BenchSettings, caches_to_compare
from research.speed.messages import Generate, GoBack, Read, Start
from research.speed.process import CacheFailedError, WorkerProcess
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

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
    with tiny_llama(path, n_ctx=TRAINED, hh=32, recent=32, recall=0) as llm:
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


def test_windows_of_the_full_cache_are_no_larger_than_they_have_to_be(tmp_path: Path) -> None:
    """As fast as llama.cpp can be, to compare with."""
    variant = {"arch_variant": "sliding_window", "n_ctx_train": 4096}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=5, **variant)
    full = MeasuredCache("full", kind="full", cells=4096)
    start = Start(full, path, 4096, Compute(threads=1), (1, 5, 6))
    with closing(WorkerProcess(start)) as worker:
        windowed = worker.ready.use.bytes_fixed
    with tiny_llama(path, n_ctx=4096, evict=False, swa_full=False) as llm:
        assert windowed == llm.kv.bytes_fixed
    with tiny_llama(path, n_ctx=4096, evict=False) as llm:
        assert windowed < llm.kv.bytes_fixed


def test_worker_finds_evicted_rows(path: Path) -> None:
    """Those that a token finds count as rows that it attends to."""
    cache = MeasuredCache("a", policy="h2o", cells=256, heavy=56, recent=40, rows=96, recall=24)
    start = started(path, cache, 700)
    with closing(WorkerProcess(start)) as worker:
        begun = worker.ask(Generate(50))
        worker.ask(GoBack(0))
        reading = [worker.ask(Read(300)), worker.ask(Read(40, last=True))]
        generated = worker.ask(Generate(70))
    assert (begun.after.used, begun.after.found_share) == (50, 0)
    with tiny_llama(path, n_ctx=TRAINED, hh=56, recent=40, recall=24) as llm:
        llm.eval(start.tokens[:300])
        llm.eval(start.tokens[300:340])
        kv = llm.kv
    assert reading[1].after.used == kv.used + 24
    assert reading[1].after.bytes_archive == kv.bytes_archive > 0
    assert reading[1].after.found_share == pytest.approx(kv.found_share)
    assert kv.found_share > 0
    assert generated.after.found_share != reading[1].after.found_share
    assert generated.after.bytes_in_use > 0.9 * generated.after.bytes_total * 96 / 256


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
        f"more than {TRAINED} tokens are beyond what the model was" in note for note in report.notes
    )
