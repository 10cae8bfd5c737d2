"""Caches in processes of their own."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from pyh2o.bench.process import Cache, CacheFailedError, Worker
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

TRAINED = 1024
TOKENS = [3 + i * 7919 % 300 for i in range(720)]
ONE = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=3, n_ctx_train=TRAINED)


def test_cache_evicts_as_the_library_does(path: Path) -> None:
    """Rows that a token finds count as rows that it attends to."""
    for recall in (0, 24):
        settings = {"n_ctx": TRAINED, "hh": 56, "recent": 40, "recall": recall, "policy": "h2o"}
        with closing(Worker(Cache("a", {**settings, **ONE}), path, TOKENS)) as worker:
            assert worker.ready.use.used == 0  # the warm-up is forgotten
            worker.ask("read", 300)
            read = worker.ask("end", 40)
            generated = worker.ask("generate", 4)
            again = worker.ask("reset")
        with tiny_llama(path, **settings) as llm:
            llm.eval(TOKENS[:300])
            llm.eval(TOKENS[300:340])
            kv = llm.kv
        assert (read.position, generated.position, again.position) == (340, 344, 0)
        assert (read.use.cells, read.use.used) == (kv.cells, kv.used + recall)
        assert read.use.compactions == kv.compactions > 0
        assert read.use.bytes_kv == kv.bytes_total
        assert read.use.bytes_archive == kv.bytes_archive
        assert read.use.found_share == (pytest.approx(kv.found_share) if recall else None)
        assert read.seconds > 0
        assert generated.peak_bytes > read.use.bytes_kv


def test_refused_cache_gives_the_reason(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", seed=1, arch_variant="alibi")
    with pytest.raises(CacheFailedError, match=r"^eviction cannot be used .*ALiBi"):
        Worker(Cache("a", ONE), path, [1, 5, 6])


def test_process_that_is_killed_gives_a_reason(path: Path) -> None:
    with closing(Worker(Cache("a", {**ONE, "evict": False}), path, TOKENS)) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(CacheFailedError, match="its process was ended by signal 9"):
            worker.ask("generate", 1)


def test_process_ends_with_its_context(path: Path) -> None:
    with closing(Worker(Cache("a", {**ONE, "evict": False}), path, TOKENS)) as worker:
        pid = worker.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
