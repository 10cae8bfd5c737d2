"""Number of threads to compute with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyh2o.system import threads
from pyh2o.system.threads import physical_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores with two threads each; this process may use six threads of three cores."""
    for cpu in range(8):
        folder = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(threads, "_TOPOLOGY", tmp_path / "cpus")
    monkeypatch.setattr(threads, "_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 6}, raising=False)
    return tmp_path


def test_hardware_threads_of_one_core_count_once(machine: Path) -> None:
    assert physical_cores() == 3


def test_cores_of_unknown_topology_are_all_counted(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_TOPOLOGY", machine / "nowhere")
    assert physical_cores() == 6


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", 3),
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("900000 100000", 3),
        ("nonsense", 3),
        ("1 0", 3),
    ],
)
def test_the_cpu_limit_of_a_container_is_respected(machine: Path, limit: str, cores: int) -> None:
    (machine / "cpu.max").write_text(limit + "\n")
    assert physical_cores() == cores


def test_the_default_on_this_machine_is_plausible() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
