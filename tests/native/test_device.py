"""A cache that is not in host memory: rows are moved and rotated where they lie.

Runs on the GPU if there is one. Elsewhere ggml's RPC backend stands for it: its buffers cannot be
reached by pointer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyh2o import build_info
from pyh2o.library.devices import gpu_names
from rpc_servers import rpc_server
from some_policies import in_research
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.skipif(
    not gpu_names() and "rpc" not in str(build_info()["backends"]),
    reason="needs a GPU, or a build without -DGGML_RPC=OFF",
)

# Tokens at once; a single one takes another way through the kernels of a GPU.
CHUNK = 7


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """This machine's GPU, or a server on loopback that computes for others."""
    if gpu_names():
        yield "gpu"
        return
    with rpc_server() as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("attention", "policy", "chunk"),
    [
        ("composed", "h2o", CHUNK),
        ("flash", "h2o", CHUNK),
        ("flash", "h2o", 1),
        ("composed", "h2o-far:near=4", CHUNK),
        ("composed", "h2o-far:near=4", 1),
        ("composed", "roco", CHUNK),
        ("composed", "snap:queries=5,pool=1", CHUNK),
        ("composed", in_research("keydiff:KeyDiff"), CHUNK),
        ("composed", in_research("expected:Expected:queries=6,covariance=true"), CHUNK),
    ],
)
def test_rows_on_a_device_are_those_of_the_reference(
    tmp_path: Path, device: str, attention: str, policy: str, chunk: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=64)
    compare(device, path, "reference", attention, policy, str(chunk))


@pytest.mark.parametrize(
    ("kv_type", "head_size", "gpu_layers"),
    [
        ("f16", 32, -1),
        ("f16", 32, 2),
        ("q8_0", 64, -1),
        ("q8_0", 32, 3),
        ("q4_0", 32, -1),
    ],
)
def test_rows_on_a_device_are_moved_and_rotated_as_on_the_host(
    tmp_path: Path, device: str, kv_type: str, head_size: int, gpu_layers: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=128, head_size=head_size)
    compare(device, path, "host", kv_type, str(gpu_layers), "flash")


@pytest.mark.parametrize(
    ("variant", "attention"),
    [
        ("sliding_window", "flash"),
        ("gpt_oss", "flash"),
        ("lfm2", "flash"),
        # V has room for the largest layer's heads
        ("lfm2", "composed"),
        ("gemma4_experts", "composed"),
    ],
)
def test_windows_and_states_on_a_device_are_as_on_the_host(
    tmp_path: Path, device: str, variant: str, attention: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, seed=3, n_ctx_train=128, n_layer=4, arch_variant=variant)
    compare(device, path, "host", "f16", "-1", attention)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_rows_on_a_device_are_recalled_as_on_the_host(
    tmp_path: Path, device: str, kv_type: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=128)
    compare(device, path, "recall", kv_type)


@pytest.mark.parametrize(
    ("n_layers", "kv_type", "attention", "kqv"),
    [
        (0, "f16", "auto", "kqv"),
        (1, "f16", "auto", "kqv"),
        (3, "f16", "auto", "kqv"),
        (5, "f16", "auto", "kqv"),
        (3, "q8_0", "auto", "kqv"),
        (3, "q4_0", "auto", "kqv"),
        (3, "f16", "ops", "kqv"),
        (3, "f16", "auto", "host"),
    ],
)
def test_layers_that_a_device_shares_with_the_cpu(
    tmp_path: Path, n_layers: int, kv_type: str, attention: str, kqv: str
) -> None:
    """The device asks for large products of the CPU's layers, and for the ops beside them."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=1024, n_layer=4)
    log = run_client("mock", path, "shared", kv_type, str(n_layers), attention, kqv)
    assert ("Mock0 KV buffer" in log) == (n_layers > 1 and kqv == "kqv")


def test_scores_are_added_up_on_a_device_without_an_outer_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=1024, n_layer=4)
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")
    monkeypatch.setenv("MOCK_LACKS", "OUT_PROD")
    log = run_client("mock", path, "shared", "f16", "5", "ops", "kqv")
    products = [line for line in log.splitlines() if "OUT_PROD)" in line]
    assert len(products) > 0  # of the cache on the host
    assert not any("Mock0" in line for line in products)


def test_device_that_cannot_move_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    monkeypatch.setenv("MOCK_LACKS", "CPY")
    run_client("mock", path, "refused")


def test_heads_of_a_layer_on_several_devices_are_refused(tmp_path: Path, device: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    run_client(device, path, "split")


@pytest.mark.skipif(gpu_names() != [], reason="needs two devices, which only servers are here")
def test_layers_on_two_devices(tmp_path: Path, device: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=64)
    with rpc_server() as other:
        log = run_client(f"{device},{other}", path, "reference", "composed", "h2o", str(CHUNK))
    assert "dev = RPC0" in log
    assert "dev = RPC1" in log


def compare(device: str, path: Path, *arguments: str) -> None:
    """Fails if the two differ, or if the cache is not where it should be."""
    log = run_client(device, path, *arguments)
    assert any("KV buffer" in line and "CPU" not in line for line in log.splitlines())


def run_client(device: str, path: Path, *arguments: str) -> str:
    """The log of a comparison that found no difference."""
    client = Path(__file__).parents[1] / "helpers" / "rows_on_a_device.py"
    result = subprocess.run(
        [sys.executable, str(client), device, str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr
