"""Available memory with and without a container's limit, and returning freed memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from own_memory import own_bytes
from pyh2o.system import memory
from pyh2o.system.memory import (
    available_bytes,
    give_back_freed_memory,
    resident_bytes,
    spare_bytes,
    total_bytes,
)

# Larger than the blocks that glibc caches for each thread.
N_PIECES, SIZE, LITTLE = 600, 64 << 10, 2048


# Names of files of version 1 of control groups.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def add_group(
    root: Path,
    path: str,
    limit: int | str,
    used: int,
    limit_file: str = "memory.max",
    used_file: str = "memory.current",
    prefix: str = "",
) -> None:
    """Add a control group; sizes are in KiB, and 40 KiB are cached files."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    statistics = f"anon 5\n{prefix}active_file {10 << 10}\n{prefix}inactive_file {30 << 10}\n"
    (folder / limit_file).write_text(f"{limit << 10 if isinstance(limit, int) else limit}\n")
    (folder / used_file).write_text(f"{used << 10}\n")
    (folder / "memory.stat").write_text(statistics)


@pytest.mark.parametrize(
    ("own", "groups", "available", "total"),
    [
        ((), (), 800, 1000),
        (("0::/",), [("", 500, 200)], 340, 500),
        (("0::/",), [("", 1000, 140)], 800, 1000),
        (("0::/",), [("", 100, 200)], 0, 100),  # exceeded
        (("4:memory:/", "0::/"), [("", "max", 200)], 800, 1000),
        # a service in a slice with a limit, most of which other services use
        (("0::/a.slice/b",), [("a.slice/b", 600, 100), ("a.slice", 700, 690)], 50, 600),
        # Docker with version 1: a group without a limit in the container's group
        (
            ("11:cpu,memory:/docker/4f/own", "1:name=systemd:/docker/4f", "0::/docker/4f"),
            [("memory/docker/4f", 600, 250, *V1), ("memory/docker/4f/own", 2**52, 250, *V1)],
            390,
            600,
        ),
        (("9:cpu,cpuacct:/docker/4f", "0::/a"), [("a", "nonsense", 100)], 800, 1000),
        (None, [("", 500, 200)], 800, 1000),
    ],
)
def test_container_limits_reduce_available_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[str, ...] | None,
    groups: list[tuple[Any, ...]],
    available: int,
    total: int,
) -> None:
    """The machine has 1,000 KiB, of which 800 are available; `own` is /proc/self/cgroup."""
    monkeypatch.setattr(memory, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN", tmp_path / "own")
    machine = SimpleNamespace(total=1000 << 10, available=800 << 10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    for group in groups:
        add_group(tmp_path / "cgroup", *group)
    if own is not None:
        (tmp_path / "own").write_text("".join(f"{line}\n" for line in own))
    assert (available_bytes(), total_bytes()) == (available << 10, total << 10)


@pytest.mark.skipif(not hasattr(psutil.Process().memory_info(), "shared"), reason="not known")
def test_mapped_weights_are_not_available_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size = tmp_path / "weights", 64 << 20
    path.write_bytes(bytes(size))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**40)
    resident, own, spare = resident_bytes(), own_bytes(), spare_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        assert resident_bytes() - resident > size * 0.9
        assert own_bytes(os.getpid()) - own < size * 0.1
        assert spare - spare_bytes() > size * 0.9


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only for glibc's malloc")
def test_freed_blocks_between_used_ones_are_returned() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces, others = [], []
    for _ in range(N_PIECES):
        pieces.append(libc.malloc(SIZE))
        others.append(libc.malloc(LITTLE))
        ctypes.memset(pieces[-1], 1, SIZE)
    for piece in pieces:
        libc.free(piece)
    before = resident_bytes()
    give_back_freed_memory()
    assert resident_bytes() < before - N_PIECES * SIZE // 2
    for other in others:
        libc.free(other)
