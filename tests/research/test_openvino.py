"""OpenVINO GenAI beside this runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from needed import needed
from pyh2o.bench.process import Cache, CacheFailedError, Worker
from pyh2o.errors import MissingPackageError, SettingsError
from research.speed import openvino
from research.speed.openvino import check_packages, eviction_parts
from tiny_gguf import write_tiny_gguf

TRAINED = 512
# K and V of three layers and two heads with 32 elements, f16.
TOKEN_BYTES = 2 * 3 * 2 * 32 * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needed("openvino_genai", name="openvino-genai", install="'.[openvino]'")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(
        path, seed=3, n_ctx_train=TRAINED, dtype=GGMLQuantizationType.F16, bpe=True
    )


@contextmanager
def worker(model: Path, *, rows: int = 0, cells: int = TRAINED) -> Iterator[Worker]:
    """A process of its own: OpenVINO leaves a handler of Ctrl-C behind that is no more."""
    settings = {"threads": 1, "cells": cells, "most_tokens": 300, "rows": rows}
    cache = Cache("openvino", settings, "research.speed.openvino:open_openvino", at_once=True)
    with closing(Worker(cache, model, range(1, 301))) as process:
        yield process


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"openvino-genai: pip install 'pyh2o-llm\[openvino\]'"
    ):
        check_packages()


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(96, (32, 32, 96)), (127, (32, 32, 96)), (128, (32, 64, 128)), (1638, (32, 800, 1632))],
)
def test_budget_in_whole_blocks(rows: int, parts: tuple[int, int, int]) -> None:
    assert eviction_parts(rows) == parts


def test_budget_of_less_than_three_blocks() -> None:
    with pytest.raises(SettingsError, match="a --budget of 96 rows or more"):
        eviction_parts(95)


def test_full_cache_holds_the_whole_text(model: Path) -> None:
    with worker(model) as openvino:
        part = openvino.ask("read", 100)
        assert (part.position, part.use.used) == (100, 0)
        openvino.ask("end", 100)
        done = openvino.ask("generate", 1)
    assert done.position == 201
    assert (done.use.bytes_kv, done.use.cells) == (TRAINED * TOKEN_BYTES, TRAINED)
    assert done.use.used == 224  # whole blocks


def test_text_is_forgotten_and_another_one_is_begun(model: Path) -> None:
    with worker(model) as openvino:
        openvino.ask("end", 100)
        openvino.ask("read", 10)
        back = openvino.ask("reset")
        assert (back.position, back.use.used) == (0, 0)
        done = openvino.ask("generate", 3)
        assert (done.position, done.use.used) == (3, 32)


def test_eviction_leaves_the_blocks_of_the_budget(model: Path) -> None:
    with worker(model, rows=102) as openvino:
        assert openvino.ask("end", 250).use.used == 256
        done = openvino.ask("generate", 40)
    assert done.position == 290
    assert done.use.used == 128  # three blocks, and one that fills up


def test_text_that_has_no_room(model: Path) -> None:
    with (
        worker(model, cells=128) as openvino,
        pytest.raises(CacheFailedError, match="no room for the text in 128 cells: raise --ctx"),
    ):
        openvino.ask("end", 250)


def test_file_that_it_does_not_take(model: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=3, n_ctx_train=TRAINED)
    with (
        pytest.raises(CacheFailedError, match=r"OpenVINO does not take this file \(.+\): "),
        worker(other),
    ):
        pass
