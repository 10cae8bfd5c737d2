"""Caches in processes of their own."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pyh2o.bench.process import Cache, Worker
from tiny_llama import tiny_llama

TRAINED = 1024
TOKENS = [3 + i * 7919 % 300 for i in range(720)]
ONE = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


MODEL: dict[str, Any] = {"seed": 3, "n_ctx_train": TRAINED}


def test_cache_evicts_as_the_library_does(path: Path) -> None:
    """Retrieved rows count as rows that a token attends to; the process ends with the worker."""
    for recall in (0, 24):
        settings = {"n_ctx": TRAINED, "hh": 56, "recent": 40, "recall": recall, "policy": "h2o"}
        with closing(Worker(Cache("a", {**settings, **ONE}), path, TOKENS)) as worker:
            assert worker.ready.use.used == 0  # the warm-up is dropped
            worker.ask("read", 300)
            read = worker.ask("end", 40)
            generated = worker.ask("generate", 4)
            again = worker.ask("reset")
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)
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
