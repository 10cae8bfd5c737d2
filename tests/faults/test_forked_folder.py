"""A fork has the files of its parent as if it had opened copies of them by itself."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from forked_folder import ForkedFolder
from forks import Fork, answer_of

BEFORE = b"parent's"
AFTER = b"children"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_fork_has_lock_memory_and_content_of_its_own(tmp_path: Path) -> None:
    folder = ForkedFolder(tmp_path / "folder")
    path = tmp_path / "folder" / "file"
    path.write_bytes(BEFORE)
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    memory = mmap.mmap(descriptor, len(BEFORE), prot=mmap.PROT_READ)
    for _ in range(2):
        folder.copy()
        fork = Fork()
        if fork.is_here:
            folder.enter_copy()
            os.pwrite(descriptor, AFTER, 0)
            fork.leave(seen(memory, path, descriptor))
        answer = answer_of(fork)
        folder.drop_copy()
        assert answer == {"memory": "children", "file": "children", "locked": [True, False]}
        assert memory[:] == path.read_bytes() == BEFORE
        assert is_locked(path)
    os.close(descriptor)


def seen(memory: mmap.mmap, path: Path, descriptor: int) -> dict[str, Any]:
    """What is in the memory and the file, and whether that is locked while and after it is open."""
    seen = {"memory": memory[:].decode(), "file": path.read_text(), "locked": [is_locked(path)]}
    memory.close()
    os.close(descriptor)
    return {**seen, "locked": [*seen["locked"], is_locked(path)]}


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
