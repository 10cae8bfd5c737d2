"""How much memory is left, in a container with a limit and without one, and giving some back."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from own_memory import own_bytes
from pyh2o.system import memory
from pyh2o.system.memory import (
    MemoryLimit,
    available_bytes,
    give_back_freed_memory,
    memory_limits,
    resident_bytes,
    spare_bytes,
    total_bytes,
)

# The little ones are too large for lists of pieces that threads keep.
N_PIECES, SIZE, LITTLE = 600, 64 << 10, 2048


class Groups:
    """Control groups of a machine with 1,000 KiB of memory, of which 800 are available."""

    def __init__(self, folder: Path) -> None:
        self.root, self.own = folder / "cgroup", folder / "own"

    def is_in(self, *lines: str) -> None:
        """The groups of this process, as Linux tells them."""
        self.own.write_text("".join(f"{line}\n" for line in lines))

    def add(
        self,
        path: str,
        limit: str,
        used: int,
        limit_file: str = "memory.max",
        used_file: str = "memory.current",
        prefix: str = "",
    ) -> None:
        """A group, of which 40 KiB are files in memory."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        statistics = f"anon 5\n{prefix}active_file {10 * 1024}\n{prefix}inactive_file {30 * 1024}"
        files = {limit_file: limit, used_file: used, "memory.stat": statistics}
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups(tmp_path)
    monkeypatch.setattr(memory, "_ROOT", made.root)
    monkeypatch.setattr(memory, "_OWN", made.own)
    there = SimpleNamespace(total=kib(1000), available=kib(800))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    return made


def kib(number: int) -> int:
    return number * 1024


def test_this_machine() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_without_groups_it_is_what_the_machine_has(groups: Groups) -> None:
    assert memory_limits() == []
    assert available_bytes() == kib(800)
    assert total_bytes() == kib(1000)


def test_a_container_s_limit(groups: Groups) -> None:
    """Files in memory are available: they are dropped when room is needed."""
    groups.is_in("0::/")
    groups.add("", str(kib(500)), kib(200))
    assert memory_limits() == [MemoryLimit(kib(500), left=kib(340))]
    assert available_bytes() == kib(340)


def test_a_limit_of_the_first_version(groups: Groups) -> None:
    """Docker's, with a group of the container around one that has no limit."""
    groups.is_in("11:cpu,memory:/docker/4f/own", "1:name=systemd:/docker/4f", "0::/docker/4f")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    groups.add("memory/docker/4f", str(kib(600)), kib(250), *names)
    groups.add("memory/docker/4f/own", str(2**63 - 4096), kib(250), *names)
    assert MemoryLimit(kib(600), left=kib(390)) in memory_limits()
    assert available_bytes() == kib(390)
    assert total_bytes() == kib(600)


def test_a_limit_above_what_is_available(groups: Groups) -> None:
    groups.is_in("0::/")
    groups.add("", str(kib(1000)), kib(140))
    assert available_bytes() == kib(800)


def test_no_limit(groups: Groups) -> None:
    groups.is_in("4:memory:/", "0::/")
    groups.add("", "max", kib(200))
    assert memory_limits() == []
    assert available_bytes() == kib(800)


def test_the_narrowest_of_the_groups_around_it_counts(groups: Groups) -> None:
    """A service in a slice: the slice has the limit, and others in it have used most of it."""
    groups.is_in("0::/user.slice/run.scope")
    groups.add("user.slice/run.scope", str(kib(600)), kib(100))
    groups.add("user.slice", str(kib(700)), kib(690))
    assert available_bytes() == kib(50)


def test_a_limit_that_is_exceeded_leaves_nothing(groups: Groups) -> None:
    groups.is_in("0::/")
    groups.add("", str(kib(100)), kib(200))
    assert available_bytes() == 0


def test_groups_that_cannot_be_read(groups: Groups) -> None:
    groups.is_in("9:cpu,cpuacct:/docker/4f", "0::/a")
    groups.add("a", "nonsense", kib(100))
    groups.add("", str(kib(400)), kib(100))
    (groups.root / "memory.stat").unlink()
    assert available_bytes() == kib(800)


@pytest.mark.skipif(not hasattr(psutil.Process().memory_info(), "shared"), reason="not known")
def test_files_in_memory_are_neither_own_nor_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's weights lie in one."""
    path, size = tmp_path / "weights", 64 << 20
    path.write_bytes(bytes(size))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**40)
    resident, own, spare = resident_bytes(), own_bytes(), spare_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        assert resident_bytes() - resident > size * 0.9
        assert own_bytes(os.getpid()) - own < size * 0.1
        assert spare - spare_bytes() > size * 0.9


@pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another malloc than that of glibc"
)
def test_what_is_freed_between_others_is_given_back() -> None:
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
