"""OpenVINO GenAI beside this runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from cli_fakes import run
from needed import needed
from pyh2o.errors import MissingPackageError, SettingsError
from research.eval.caches import Compute, MeasuredCache
from research.speed import bandwidth, openvino_worker
from research.speed.messages import Generate, GoBack, Read, Start
from research.speed.openvino_worker import check_packages, eviction_parts, open_openvino
from research.speed.process import CacheFailedError, WorkerProcess
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


def start_of(model: Path, *, rows: int = 0, cells: int = TRAINED, gpu_layers: int = 0) -> Start:
    cache = MeasuredCache("openvino", "openvino", rows=rows, cells=cells)
    compute = Compute(threads=1, gpu_layers=gpu_layers)
    return Start(cache, model, TRAINED, compute, tuple(range(1, 301)))


@contextmanager
def worker(model: Path, *, rows: int = 0, cells: int = TRAINED) -> Iterator[WorkerProcess]:
    """A process of its own: OpenVINO leaves a handler of Ctrl-C behind that is no more."""
    with closing(WorkerProcess(start_of(model, rows=rows, cells=cells))) as process:
        yield process


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_worker, "find_spec", lambda name: None)
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


def test_layers_on_a_gpu_are_refused() -> None:
    with pytest.raises(SettingsError, match="on the CPU only: leave out --gpu-layers"):
        open_openvino(start_of(Path("any.gguf"), gpu_layers=-1))


def test_full_cache_holds_the_whole_text(model: Path) -> None:
    with worker(model) as openvino:
        part = openvino.ask(Read(100))
        assert (part.position, part.after.used) == (100, 0)
        openvino.ask(Read(100, last=True))
        done = openvino.ask(Generate(1))
    assert done.position == 201
    assert (done.after.bytes_rows, done.after.cells) == (TRAINED * TOKEN_BYTES, TRAINED)
    assert done.after.used == 224  # whole blocks


def test_text_is_forgotten_and_another_one_is_begun(model: Path) -> None:
    with worker(model) as openvino:
        openvino.ask(Read(100, last=True))
        assert openvino.ask(GoBack(60)).position == 100  # it cannot
        openvino.ask(Read(10))
        back = openvino.ask(GoBack(0))
        assert (back.position, back.after.used) == (0, 0)
        done = openvino.ask(Generate(3))
        assert (done.position, done.after.used) == (3, 32)


def test_eviction_leaves_the_blocks_of_the_budget(model: Path) -> None:
    with worker(model, rows=102) as openvino:
        assert openvino.ask(Read(250, last=True)).after.used == 256
        done = openvino.ask(Generate(40))
    assert done.position == 290
    assert done.after.used == 128  # three blocks, and one that fills up


def test_cache_is_filled_to_its_last_cell(model: Path) -> None:
    with worker(model, cells=256) as openvino:
        openvino.ask(Read(250, last=True))
        done = openvino.ask(Generate(6))
    assert (done.position, done.after.used) == (256, 256)


def test_text_that_has_no_room(model: Path) -> None:
    with (
        worker(model, cells=128) as openvino,
        pytest.raises(CacheFailedError, match="no room for the text in 128 cells: raise --ctx"),
    ):
        openvino.ask(Read(250, last=True))


def test_file_that_it_does_not_take(model: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=3, n_ctx_train=TRAINED)
    with pytest.raises(CacheFailedError, match=r"OpenVINO does not take this file \(.+\): "):
        WorkerProcess(start_of(other))


@pytest.mark.usefixtures("surroundings")
def test_rows_in_the_table(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "bytes_per_second", lambda threads: 10e9)
    arguments = ["--history", "0,300", "--budget", "0.2,64", "--kv-type", "f16", "--rounds", "2"]
    arguments += ["-n", "4", "--threads", "1", "--compare", "openvino", "--json", "b.json"]
    output = run("bench", "-m", str(model), *arguments)
    assert output.code == 0, output.notes
    assert output.text.count("| openvino, 20 % | 0.4 MiB | 100.0% |") == 2
    assert "openvino, 64 rows: OpenVINO evicts blocks of 32 tokens" in output.text
    data = json.loads(Path("b.json").read_text())
    found = {one["cache"]: one for one in data["histories"][1]["figures"]}
    for name in ("openvino", "openvino, 20 %"):
        assert found[name]["position"] == 300
        assert found[name]["share_of_full"] == 1.0
        assert found[name]["read_per_second"] > 0
        assert len(found[name]["rounds"]) == 2
    evicted = found["openvino, 20 %"]["bytes_per_token"]
    assert evicted < found["openvino"]["bytes_per_token"]
