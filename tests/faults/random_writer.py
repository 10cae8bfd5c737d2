"""Does things to the files of a folder, in all ways that are noted, and flushes them at last.

python tests/faults/random_writer.py FOLDER LOG SEED
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from faulty_process import Fault, in_front_of_libraries

NEVER = ctypes.c_long(1 << 40)


class Writer:
    """Things that can be done to a file of the current folder, and to another one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def write(self, file: Path, _: Path) -> None:
        """From its beginning, in place of what was there."""
        file.write_bytes(self._rng.randbytes(self._rng.randrange(9000)))

    def append(self, file: Path, _: Path) -> None:
        """At its end."""
        with file.open("ab") as opened:
            opened.write(self._rng.randbytes(100))

    def overwrite(self, file: Path, _: Path) -> None:
        """Anywhere in it, and behind it."""
        with file.open("rb+", buffering=0) as opened:
            os.pwrite(opened.fileno(), self._rng.randbytes(5000), self._rng.randrange(20000))
            opened.seek(self._rng.randrange(20000))
            opened.write(self._rng.randbytes(5000))

    def resize(self, file: Path, _: Path) -> None:
        """Shorten it, or fill it up with zeros."""
        with file.open("rb+") as opened:
            opened.truncate(self._rng.randrange(20000))

    def rename(self, file: Path, other: Path) -> None:
        """In place of another one."""
        file.rename(other)

    def link(self, file: Path, other: Path) -> None:
        """Give it another name."""
        other.unlink(missing_ok=True)
        other.hardlink_to(file)

    def remove(self, file: Path, _: Path) -> None:
        """Remove it."""
        file.unlink()

    def copy(self, file: Path, other: Path) -> None:
        """Into another one, without reading it."""
        with file.open("rb") as source, other.open("wb", buffering=0) as target:
            target.write(b"begin")
            if hasattr(os, "copy_file_range"):
                os.copy_file_range(source.fileno(), target.fileno(), 3000)
                os.copy_file_range(source.fileno(), target.fileno(), 3000, 10, 20)


def main(folder: str, log: str, seed: str) -> None:
    """Do it."""
    in_front_of_libraries(Path(__file__).with_name("faulty_files.c"))
    rng = random.Random(seed)
    os.chdir(folder)
    library = ctypes.CDLL(None)
    library.faulty_log(os.fsencode(log))
    library.faulty_arm(os.fsencode(folder), ctypes.c_int(Fault.POWER), NEVER, ctypes.c_ulonglong(0))
    writer = Writer(rng)
    on_existing: list[Callable[[Path, Path], None]] = [
        *(writer.append, writer.overwrite, writer.resize, writer.rename, writer.link),
        *(writer.remove, writer.copy),
    ]
    for _ in range(400):
        # some by their names alone, others by whole paths
        there = rng.choice((Path(), Path(folder)))
        files = [there / path.name for path in sorted(Path().iterdir())]
        file, other = (rng.choice([*files, there / f"file{rng.randrange(9)}"]) for _ in range(2))
        if not file.exists():
            writer.write(file, other)
        elif file != other and not (other.exists() and file.samefile(other)):
            rng.choice(on_existing)(file, other)
    for path in (*Path().iterdir(), Path()):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
