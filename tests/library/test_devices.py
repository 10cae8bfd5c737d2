"""Missing GPUs, and the default number of layers on GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from cli_fakes import run_program
from pyh2o.cache.native import device_bytes
from pyh2o.cache.settings import EvictionSettings
from pyh2o.cli import loading
from pyh2o.cli.options import KVType, ModelOptions
from pyh2o.core import context
from pyh2o.core.description import weights_of_layers
from pyh2o.errors import ModelError
from pyh2o.library import backends, devices
from pyh2o.library.devices import fit_layers
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

GIB = 2**30

without_gpu = pytest.mark.skipif(devices.gpu_names() != [], reason="this machine has a GPU")


class FakeDevice:
    """A simulated GPU."""

    def __init__(self, free: float, name: str = "Fake GPU") -> None:
        self.name = name
        self._free = round(free)

    def free_bytes(self) -> int:
        return self._free


def card(gib: float, name: str = "a card") -> Any:
    return FakeDevice(gib * GIB, name)


def n_fitting(layers: list[int], *gpus: Any) -> int:
    return fit_layers([size * GIB for size in layers], gpus)[0]


@pytest.mark.parametrize(
    ("free", "n_layers"),
    [(0, 0), (1, 0), (2.9, 0), (3, 1), (3.9, 1), (4, 2), (6.9, 4), (7, 5), (80, 5)],
)
def test_layers_leave_a_margin_of_memory(free: float, n_layers: int) -> None:
    """Four layers of 1 GiB, an output of 2, and a margin of 1."""
    assert n_fitting([1, 1, 1, 1, 2], card(free)) == n_layers


def test_last_layers_are_counted_first() -> None:
    assert n_fitting([9, 9, 1, 1, 1], card(4)) == 3
    assert n_fitting([1, 1, 1, 9, 1], card(4)) == 1


def test_every_gpu_keeps_a_margin() -> None:
    layers = [1] * 11
    assert n_fitting(layers, card(20)) == 11
    assert n_fitting(layers, card(7), card(7)) == 11
    assert n_fitting(layers, card(4), card(4)) == 6


def test_the_message_names_layers_and_memory() -> None:
    _, some = fit_layers([GIB] * 10, [card(3, "A"), card(3.5, "B")])
    assert some == "4 of 10 layers on A, B (4.0 of 6.5 GiB)"
    _, none = fit_layers([GIB] * 10, [card(1.5, "Small")])
    assert none == "no layer fits on Small (1.5 GiB free): running on the CPU"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
def test_sizes_of_weights_are_read_from_the_file(
    tmp_path: Path, tied: bool, dtype: GGMLQuantizationType
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", seed=1, n_layer=3, dtype=dtype, tied_output=tied)
    expected = [0, 0, 0, 0]
    for tensor in GGUFReader(path).tensors:
        first, *others = tensor.name.split(".")
        if first == "blk":
            expected[int(others[0])] += int(tensor.n_bytes)
        elif first.startswith("output") or (tied and first == "token_embd"):
            expected[3] += int(tensor.n_bytes)
    assert weights_of_layers(path) == expected
    assert min(expected) > 0


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(50))
    with pytest.raises(ModelError, match="cannot be read"):
        weights_of_layers(path)


@without_gpu
def test_the_cpu_is_not_a_gpu() -> None:
    assert backends.local_devices() == []


def layers_for(
    monkeypatch: pytest.MonkeyPatch, path: Path, free: int, options: ModelOptions, texts: int = 1
) -> int:
    monkeypatch.setattr(backends, "discrete_gpus", lambda: [FakeDevice(free)])
    machine = {"n_gpu_layers": 0, "verbose": False}
    settings = loading.with_gpu_layers(machine, options, path, texts=texts)
    assert settings["verbose"] is False
    return int(settings["n_gpu_layers"])


def test_the_default_number_of_layers_fits_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", seed=1, n_layer=5, n_ctx_train=4096)
    options = ModelOptions(kv_type=KVType.f16)
    assert layers_for(monkeypatch, path, 4 * GIB, options) == 6
    assert capsys.readouterr().err == "6 of 6 layers on Fake GPU (0.0 of 4.0 GiB)\n"

    *layers, output = loading.layer_bytes(options, path, texts=1)
    for n_layers in (1, 3, 6):
        free = devices.MARGIN + output + sum(layers[len(layers) + 1 - n_layers :])
        assert layers_for(monkeypatch, path, free, options) == n_layers
        assert layers_for(monkeypatch, path, free - 1, options) == n_layers - 1
        if n_layers > 1:  # the output has no cache
            assert layers_for(monkeypatch, path, free, options, texts=2) < n_layers
            full = replace(options, no_evict=True)
            assert layers_for(monkeypatch, path, free, full) < n_layers


@without_gpu
def test_layers_on_a_gpu_have_a_larger_slack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", seed=1, n_layer=5, n_ctx_train=2048)
    *_, on_cpu, _ = loading.layer_bytes(ModelOptions(), path, texts=1)
    explicit = ModelOptions(eviction=EvictionSettings(slack=512))
    expected = loading.layer_bytes(explicit, path, texts=1)
    monkeypatch.setattr(context, "why_no_gpu", lambda: None)
    assert loading.layer_bytes(ModelOptions(), path, texts=1) == expected
    assert expected[-2] > on_cpu


def test_options_override_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", seed=1)
    for options in (ModelOptions(gpu_layers=0), ModelOptions(rpc=["a:1"])):
        assert layers_for(monkeypatch, path, 4 * GIB, options) == 0


@without_gpu
def test_a_warning_says_that_layers_run_on_the_cpu(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    with pytest.warns(RuntimeWarning, match="running on the CPU"):
        llm = tiny_llama(path, hh=8, recent=8, n_gpu_layers=-1)
    llm.eval([1, 2, 3])
    assert device_bytes(llm.text.model.address) == 0
    llm.close()


@without_gpu
@pytest.mark.usefixtures("surroundings")
def test_the_program_prints_the_warning_in_one_line(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    options = ("--model", path, "-n", "2", "--hh", "8", "--gpu-layers", "-1")
    out = run_program("generate", "--prompt", "a", *options)
    assert out.code == 0
    first, _last = out.notes.splitlines()
    assert first.endswith("running on the CPU")


def test_the_reason_for_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", list)
    monkeypatch.setattr(devices, "_backends", lambda: ["cpu", "cuda"])
    assert str(devices.why_no_gpu()).startswith("the cuda backend finds no GPU: install")
    assert not devices.has_own_kernels()
    monkeypatch.setattr(devices, "_backends", lambda: ["cpu"])
    assert "GGML_CUDA" in str(devices.why_no_gpu())


def test_own_kernels_need_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["a card"])
    assert devices.why_no_gpu() is None
    for backend, has_kernels in (("cuda", True), ("vulkan", False)):
        monkeypatch.setattr(devices, "_backends", lambda name=backend: ["cpu", name])
        assert devices.has_own_kernels() == has_kernels
