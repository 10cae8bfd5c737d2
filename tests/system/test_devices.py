"""GPUs that are asked for where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

import pyh2o
from cli_fakes import run_program
from pyh2o.system import devices
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

without_gpu = pytest.mark.skipif(devices.gpu_names() != [], reason="this machine has a GPU")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1)


@without_gpu
def test_layers_run_on_the_cpu_and_a_warning_says_so(path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="running on the CPU"):
        llm = tiny_llama(path, hh=8, recent=8, n_gpu_layers=-1)
    llm.eval([1, 2, 3])
    assert llm.device_bytes == 0
    llm.close()


@without_gpu
@pytest.mark.usefixtures("surroundings")
def test_the_program_says_so_in_one_line(path: Path) -> None:
    out = run_program(
        "generate", "--model", path, "--prompt", "a", "-n", "2", "--hh", "8", "--gpu-layers", "-1"
    )
    assert out.code == 0
    first, _last = out.notes.splitlines()
    assert first.endswith("running on the CPU")


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", list)
    monkeypatch.setattr(devices, "_backends", lambda: ["cpu", "cuda"])
    assert str(devices.why_no_gpu()).startswith("the cuda backend finds no GPU: install")
    assert not devices.has_own_kernels()
    monkeypatch.setattr(devices, "_backends", lambda: ["cpu"])
    assert "GGML_CUDA" in str(devices.why_no_gpu())


def test_kernels_of_ours_are_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["a card"])
    assert devices.why_no_gpu() is None
    for backend, has_kernels in (("cuda", True), ("vulkan", False)):
        monkeypatch.setattr(devices, "_backends", lambda name=backend: ["cpu", name])
        assert devices.has_own_kernels() == has_kernels


def test_backends_are_those_of_the_build() -> None:
    assert devices._backends() == pyh2o.build_info()["backends"]
