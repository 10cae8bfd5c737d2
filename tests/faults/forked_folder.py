"""A folder of open, locked and mapped files, of which each fork gets its own copy.

Parent and child share the lock, position and mapping of an open file. So a copy has the folder's
name while the child lives, and the child opens and maps the copy instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_MAP_FIXED = 0x10
_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class ForkedFolder:
    """A folder of files whose mappings are only read.

    Args:
        path: the folder, which is emptied.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._parents = self._path.with_name(self._path.name + " of the parent")
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir()

    def copy(self) -> None:
        """Give the folder's name to a copy, before the fork."""
        self._path.rename(self._parents)
        shutil.copytree(self._parents, self._path)

    def enter_copy(self) -> None:
        """Replace the parent's open files by their copies, in the child."""
        for file, descriptors in self._open_files().items():
            copy = os.open(self._path / file.relative_to(self._parents), os.O_RDWR)
            fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for begin, size, offset in _mappings(file):
                flags = mmap.MAP_SHARED | _MAP_FIXED
                if _C.mmap(begin, size, mmap.PROT_READ, flags, copy, offset) != begin:
                    raise OSError(ctypes.get_errno(), "cannot map the copy", str(file))
            for descriptor in descriptors:
                os.dup2(copy, descriptor, inheritable=False)
            os.close(copy)

    def drop_copy(self) -> None:
        """Remove the copy and restore the folder's name, after the child has ended."""
        shutil.rmtree(self._path)
        self._parents.rename(self._path)

    def _open_files(self) -> dict[Path, list[int]]:
        """Return the parent's open files with their descriptors."""
        found: dict[Path, list[int]] = {}
        for link in list(Path("/proc/self/fd").iterdir()):
            try:
                file = link.readlink()
            except FileNotFoundError:  # the descriptor of this listing
                continue
            if self._parents in file.parents:
                found.setdefault(file, []).append(int(link.name))
        return found


def _mappings(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield address, size and file offset of each mapping."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {file}"):
            addresses, _, offset, *_ = line.split()
            begin, end = (int(part, 16) for part in addresses.split("-"))
            yield begin, end - begin, int(offset, 16)
