"""A cache in device memory: rows are moved and rotated on the device.

Runs on the GPU if there is one. Elsewhere ggml's RPC backend stands in: its buffers cannot be
accessed by pointer. PYH2O_TEST_DEVICE names another device, as in helpers/rows_on_a_device.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from cli_fakes import PATIENCE
from pyh2o import build_info
from pyh2o.library.devices import gpu_names
from rpc_servers import rpc_server
from some_policies import in_research
from tiny_gguf import write_tiny_gguf

DEVICE = os.environ.get("PYH2O_TEST_DEVICE", "gpu" if gpu_names() else None)

pytestmark = pytest.mark.skipif(
    DEVICE is None and "rpc" not in str(build_info()["backends"]),
    reason="needs a GPU, or a build without -DGGML_RPC=OFF",
)

# Batch size. A single token takes another path through a GPU's kernels; its tensor cores,
# used for more than three tokens, would round 32-bit weights to 10 bits.
CHUNK = 3

BY_ATTENTION = (
    *("h2o", "h2o-mean", "h2o-decay:half_life=20", "h2o-far:near=4,half_life=20"),
    *("roco", "streaming"),
)
OTHERS = (
    "snap:queries=1,pool=3",
    *(() if DEVICE else ("snap:queries=5,pool=3",)),  # more than three, as above
    *map(in_research, ("keydiff:KeyDiff", "expected:Expected:queries=6,covariance=true")),
)

# CUDA has no flash attention for smaller heads.
tiny_gguf = partial(write_tiny_gguf, seed=3, head_size=64)


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """This machine's GPU, or a loopback server that computes for other processes."""
    if DEVICE:
        yield DEVICE
        return
    with rpc_server() as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("attention", "policy", "chunk"),
    [
        *(("flash", policy, 1) for policy in BY_ATTENTION),
        *(("composed", policy, CHUNK) for policy in (*BY_ATTENTION, *OTHERS)),
    ],
)
def test_rows_on_a_device_equal_the_reference(
    tmp_path: Path, device: str, attention: str, policy: str, chunk: int
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=64)
    compare(device, path, "reference", attention, policy, str(chunk))


@pytest.mark.parametrize(
    ("kv_type", "head_size", "gpu_layers"),
    [
        ("f16", 32, -1),
        ("f16", 64, 2),
        ("q8_0", 64, -1),
        ("q8_0", 32, 3),
        ("q4_0", 64, -1),
    ],
)
def test_a_device_moves_and_rotates_rows_as_the_host_does(
    tmp_path: Path, device: str, kv_type: str, head_size: int, gpu_layers: int
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=128, head_size=head_size)
    compare(device, path, "host", kv_type, str(gpu_layers), "flash")


@pytest.mark.parametrize(
    ("variant", "attention"),
    [
        ("sliding_window", "flash"),
        ("gpt_oss", "flash"),
        ("lfm2", "flash"),
        # V is allocated for the heads of the largest layer
        ("lfm2", "composed"),
        ("gemma4_experts", "composed"),
    ],
)
def test_windows_and_states_on_a_device_equal_the_host(
    tmp_path: Path, device: str, variant: str, attention: str
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=128, n_layer=4, arch_variant=variant)
    compare(device, path, "host", "f16", "-1", attention)


@pytest.mark.parametrize(
    ("kv_type", "attention"),
    [("f16", "flash"), ("f16", "composed"), ("q8_0", "flash"), ("q4_0", "flash")],
)
def test_recall_on_a_device_equals_the_host(
    tmp_path: Path, device: str, kv_type: str, attention: str
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=128)
    compare(device, path, "recall", kv_type, attention)


@pytest.mark.parametrize(
    ("variant", "kv_type", "gpu_layers", "archive"),
    [("llama", "f16", 2, ""), ("llama", "q8_0", -1, "archive"), ("gpt_oss", "f16", -1, "")],
)
def test_search_on_a_device_equals_the_host(
    tmp_path: Path, variant: str, kv_type: str, gpu_layers: int, archive: str
) -> None:
    """The device searches evicted rows itself, even if layers are on the CPU."""
    n_layer = 2 if variant == "gpt_oss" else 3
    sizes = {"n_ctx_train": 256, "arch_variant": variant, "n_layer": n_layer}
    path = tiny_gguf(tmp_path / "tiny.gguf", **sizes)
    file = str(tmp_path / archive) if archive else ""
    compare(DEVICE or "mock", path, "search", kv_type, str(gpu_layers), file)


def test_recall_of_wide_rows_on_a_device_equals_the_host(tmp_path: Path, device: str) -> None:
    """A backend may read at most 512 words of a cell."""
    sizes = {"n_layer": 1, "n_head": 9, "n_head_kv": 9, "head_size": 128, "n_ctx_train": 128}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, **sizes)
    compare(device, path, "recall", "f16", "flash")


@pytest.mark.parametrize(
    ("kv_type", "recall", "gpu_layers"),
    [("f16", 0, -1), ("f16", 20, -1), ("f16", 20, 2), ("q8_0", 20, -1)],
)
def test_a_state_loaded_on_a_device_resumes_as_the_saved_text(
    tmp_path: Path, device: str, kv_type: str, recall: int, gpu_layers: int
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=64)
    compare(device, path, "state", kv_type, str(recall), str(gpu_layers))


@pytest.mark.parametrize(
    ("n_layers", "kv_type", "attention", "kqv", "chunk"),
    [
        (0, "f16", "auto", "kqv", 64),
        (1, "f16", "auto", "kqv", 64),
        (3, "f16", "auto", "kqv", 64),
        (3, "f16", "auto", "kqv", 200),
        (5, "f16", "auto", "kqv", 64),
        (5, "f16", "auto", "kqv", 200),
        (3, "q8_0", "auto", "kqv", 64),
        (5, "q8_0", "auto", "kqv", 64),
        (3, "q4_0", "auto", "kqv", 64),
        (5, "q4_0", "auto", "kqv", 64),
        (3, "f16", "ops", "kqv", 64),
        (3, "f16", "auto", "host", 64),
    ],
)
def test_layers_split_between_a_device_and_the_cpu_equal_the_host(
    tmp_path: Path, n_layers: int, kv_type: str, attention: str, kqv: str, chunk: int
) -> None:
    """The device takes large products of the CPU's layers and the adjacent ops."""
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=1024, n_layer=4)
    ways = (kv_type, str(n_layers), attention, kqv, str(chunk))
    log = run_client(DEVICE or "mock", path, "shared", *ways)
    assert has_rows_on_a_device(log) == (n_layers > 1 and kqv == "kqv")


@pytest.mark.parametrize(
    ("policy", "recall"),
    [
        ("h2o", 0),
        ("roco", 0),
        ("h2o", 200),  # all rows: otherwise another estimate retrieves other rows
        ("h2o-far:near=4,half_life=20", 200),
        ("streaming", 200),
    ],
)
def test_prompts_of_several_texts_on_a_device_equal_the_host(
    tmp_path: Path, policy: str, recall: int
) -> None:
    """One layer: retrieved rows of a second one would already differ by rounding."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=1)
    compare("mock", path, "streams", policy, str(recall))


def test_prompts_keep_no_probabilities_on_tensor_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs need no more memory than without scores, nor more nodes than with probabilities."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=1024, n_layer=4)
    sizes = []
    for lacked in ("TENSOR_CORES", ""):
        monkeypatch.setenv("MOCK_LACKS", lacked)
        log = run_client("mock", path, "shared", "f16", "5", "auto", "kqv", "64")
        without_scores, with_scores = (
            (float(mib), int(nodes))
            for mib, nodes in re.findall(
                r"Mock0 compute buffer size = +([0-9.]+).*?nodes = ([0-9]+)", log, re.DOTALL
            )[:2]
        )
        sizes.append(with_scores)
    assert sizes[1][0] <= without_scores[0] < sizes[0][0]
    assert sizes[1][1] <= sizes[0][1]


@pytest.mark.parametrize(
    ("variant", "n_layer"),
    [
        ("sliding_window", 4),
        ("gpt_oss", 4),
        ("gemma4", 6),
        ("lfm2", 4),
        ("qwen3next", 4),
        ("mla", 3),
    ],
)
def test_memories_split_between_a_device_and_the_cpu_equal_the_host(
    tmp_path: Path, variant: str, n_layer: int
) -> None:
    """Windows, layers that attend to rows of other layers, recurrent states, latent rows."""
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=128, n_layer=n_layer, arch_variant=variant)
    numbers = f"0,1,{n_layer // 2 + 1},{n_layer + 1}"
    compare(DEVICE or "mock", path, "shared", "f16", numbers, "auto", "kqv", "20")


@pytest.mark.parametrize(
    ("variant", "n_layer"),
    [("llama", 4), ("sliding_window", 4), ("gemma4", 6), ("lfm2", 4), ("mla", 3)],
)
def test_recall_in_layers_split_with_the_cpu_equals_the_host(
    tmp_path: Path, variant: str, n_layer: int
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=128, n_layer=n_layer, arch_variant=variant)
    compare(DEVICE or "mock", path, "recall", "f16", "flash", str(n_layer // 2 + 1))


@pytest.mark.parametrize("weights", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_0])
def test_logits_along_a_text_equal_the_host(
    tmp_path: Path, device: str, weights: GGMLQuantizationType
) -> None:
    run_client(device, tiny_gguf(tmp_path / "tiny.gguf", dtype=weights), "text", "100")


def test_work_that_falls_back_to_the_cpu_is_reported(tmp_path: Path) -> None:
    run_client("mock", tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=256), "notes")


def test_a_device_has_its_own_default_slack(tmp_path: Path, device: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=1, n_ctx_train=2048)
    compare(device, path, "slack")
    log = run_client("mock", path, "slack")
    assert "Mock0 KV buffer" in log


@pytest.mark.parametrize("device", ["mock", "flushing"])
@pytest.mark.parametrize(
    ("kv_type", "head_size"), [("f16", 32), ("q8_0", 64), ("q8_0", 32), ("q4_0", 64)]
)
def test_a_device_that_flushes_denormals_does_not_move_rows(
    tmp_path: Path, device: str, kv_type: str, head_size: int
) -> None:
    """Four bytes of a row, read as a float, are often denormal."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=128, head_size=head_size)
    log = run_client(device, path, "host", kv_type, "-1", "flash")
    is_words = (kv_type, head_size) != ("q8_0", 32)
    assert ("the CPU moves" in log) == (device == "flushing" and is_words)
    compare(device, path, "prefill", kv_type)


@pytest.mark.parametrize(
    ("policy", "gpu_layers"),
    [
        ("h2o", -1),
        ("h2o-mean", 2),
        ("h2o-decay:half_life=20", -1),
        ("h2o-far:near=8,half_life=20", -1),
        ("h2o-far:near=4,half_life=20", 2),
    ],
)
def test_a_device_keeps_the_same_rows_as_the_host(
    tmp_path: Path, policy: str, gpu_layers: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=2, n_ctx_train=64)
    log = run_client(DEVICE or "mock", path, "choice", policy, str(gpu_layers))
    assert has_rows_on_a_device(log)


@pytest.mark.parametrize(("variant", "n_pos", "n_rebases"), [("llama", 64, 1), ("neox", 23, 20)])
def test_a_device_rotates_keys_as_the_host_does(
    tmp_path: Path, variant: str, n_pos: int, n_rebases: int
) -> None:
    """All keys back by half of the positions, or packed."""
    sizes = {"n_layer": 2, "n_ctx_train": n_pos, "arch_variant": variant}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, **sizes)
    assert has_rows_on_a_device(run_client(DEVICE or "mock", path, "turns", str(n_rebases)))


@pytest.mark.parametrize("policy", ["h2o", "h2o-far", "roco"])
def test_the_number_of_copies_of_a_compaction_does_not_grow_with_layers(
    tmp_path: Path, policy: str
) -> None:
    paths = [
        write_tiny_gguf(tmp_path / f"{n_layer}.gguf", seed=3, n_layer=n_layer) for n_layer in (2, 5)
    ]
    run_client("mock", paths[0], "transfers", policy, str(paths[1]))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_only_requested_rows_are_transferred(tmp_path: Path, kv_type: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=4)
    run_client("mock", path, "crossing", kv_type)


@pytest.mark.parametrize(
    ("n_layer", "n_ctx_train", "comparison"),
    [
        (2, 64, ("state", "f16", "20", "2")),
        (2, 64, ("choice", "h2o-far:near=4,half_life=20", "2")),
        (4, 512, ("crossing", "q8_0")),
        (2, 256, ("search", "f16", "2", "")),
        (1, 2048, ("waiting", "0")),
        (1, 2048, ("waiting", "20")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_the_host_waits_for_a_device(
    tmp_path: Path, n_layer: int, n_ctx_train: int, comparison: tuple[str, ...]
) -> None:
    """CUDA copies do not wait for kernels launched earlier."""
    sizes = {"n_layer": n_layer, "n_ctx_train": n_ctx_train}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, **sizes)
    run_client("queueing", path, *comparison)


def test_a_device_retrieves_rows_from_pages_that_wrapped_around(tmp_path: Path) -> None:
    sizes = {"n_layer": 1, "head_size": 128, "n_ctx_train": 16384}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, **sizes)
    run_client("mock", path, "ring")


@pytest.mark.parametrize("device", ["mock", "queueing"])
def test_a_shortened_text_retrieves_no_copies_of_removed_rows(tmp_path: Path, device: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=1, n_ctx_train=4096)
    run_client(device, path, "shortened")


def test_the_cpu_searches_if_pinned_memory_is_exhausted(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=1, n_ctx_train=64)
    run_client("mock", path, "pinned")


def test_scores_are_summed_on_a_device_without_an_outer_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=1024, n_layer=4)
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")
    monkeypatch.setenv("MOCK_LACKS", "OUT_PROD")
    log = run_client("mock", path, "shared", "f16", "5", "ops", "kqv", "64")
    products = [line for line in log.splitlines() if "OUT_PROD)" in line]
    assert len(products) > 0  # of the cache on the host
    assert not any("Mock0" in line for line in products)


def test_a_device_without_a_required_op_does_not_move_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without flash attention V is transposed, and is copied back after its rows moved."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=128)
    monkeypatch.setenv("MOCK_LACKS", "CPY")
    assert "the CPU moves" in run_client("mock", path, "host", "f16", "-1", "composed")


def test_heads_of_a_layer_on_several_devices_are_refused(tmp_path: Path, device: str) -> None:
    run_client(device, tiny_gguf(tmp_path / "tiny.gguf"), "split")


@pytest.mark.skipif(DEVICE is not None, reason="needs two devices, which only servers are here")
def test_layers_on_two_devices_equal_the_host(tmp_path: Path, device: str) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_ctx_train=64)
    with rpc_server() as other:
        log = run_client(f"{device},{other}", path, "reference", "composed", "h2o", str(CHUNK))
    assert "dev = RPC0" in log
    assert "dev = RPC1" in log


def compare(device: str, path: Path, *arguments: str) -> None:
    """Fail if the two differ or if the cache is not where it should be."""
    assert has_rows_on_a_device(run_client(device, path, *arguments))


def has_rows_on_a_device(log: str) -> bool:
    return any("KV buffer" in line and "CPU" not in line for line in log.splitlines())


def run_client(device: str, path: Path, *arguments: str) -> str:
    """Return the log of a comparison that found no difference."""
    client = Path(__file__).parents[1] / "helpers" / "rows_on_a_device.py"
    # a GPU of this machine would take layers of the mock device
    hidden = (
        {} if device == "gpu" else {"CUDA_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""}
    )
    result = subprocess.run(
        [sys.executable, str(client), device, str(path), *arguments],
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr
