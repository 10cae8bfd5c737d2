"""That a power cut takes away what it may, and nothing else."""

from __future__ import annotations

import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from power_cut import BLOCK, Disk, Entry, Step, leave_what_a_disk_has

HERE = Path(__file__).parent
FOLDER = Path("/folder")


@pytest.mark.randomised
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or shutil.which("cc") is None,
    reason="puts a library of its own in front of glibc, which a C compiler has to make",
)
def test_all_that_a_program_has_flushed_is_there(tmp_path: Path, seed: int) -> None:
    """So what the program does to its files is noted, whichever way it takes."""
    folder, log = (tmp_path / "files").resolve(), tmp_path / "log"
    folder.mkdir()
    program = HERE / "random_writer.py"
    subprocess.run([sys.executable, program, folder, log, str(seed)], check=True)
    expected = contents(folder)
    assert len(expected) > 2
    leave_what_a_disk_has(folder, log, seed)
    assert contents(folder) == expected


def test_what_was_not_flushed_may_be_gone_or_there_in_parts() -> None:
    old, new = b"o" * 2 * BLOCK, b"n" * 3 * BLOCK
    begun = [created(1, "file"), written(1, old), flushed(1), flushed(0, "."), written(1, new)]
    left = {files["file"] for files in after_cuts(*begun)}
    assert {old, new, new[:BLOCK] + old[BLOCK:], old[:BLOCK] + new[BLOCK:]} <= left
    assert {old + bytes(BLOCK), old[:BLOCK] + new[BLOCK : 2 * BLOCK] + bytes(BLOCK)} <= left
    assert all(set(content) <= set(b"on\0") for content in left)


def test_names_are_flushed_with_their_folder_and_change_in_order() -> None:
    begun = [
        *(created(1, "file"), written(1, b"old"), flushed(1), flushed(0, ".")),
        *(created(2, "other"), written(2, b"new"), flushed(2), renamed("other", "file")),
    ]
    left = after_cuts(*begun)
    before, between, after = {"file": b"old"}, {"file": b"old", "other": b"new"}, {"file": b"new"}
    assert all(files in (before, between, after) for files in left)
    assert all(files in left for files in (before, between, after))
    assert all(files == after for files in after_cuts(*begun, flushed(0, ".")))


def test_a_name_may_be_there_before_its_content() -> None:
    """Which is why one flushes before one renames."""
    begun = [created(1, "new"), written(1, b"text"), renamed("new", "file"), flushed(0, ".")]
    left = {files["file"] for files in after_cuts(*begun)}
    assert left == {b"", b"text", bytes(4)}


def created(file: int, name: str) -> Entry:
    return Entry(Step.CREATE, file, 0, str(FOLDER / name), "", b"")


def written(file: int, data: bytes) -> Entry:
    return Entry(Step.WRITE, file, 0, "", "", data)


def flushed(file: int, folder: str = "") -> Entry:
    return Entry(Step.SYNC, file, 0, folder, "", b"")


def renamed(name: str, to: str) -> Entry:
    return Entry(Step.RENAME, 0, 0, str(FOLDER / name), str(FOLDER / to), b"")


def after_cuts(*entries: Entry) -> list[dict[str, bytes]]:
    """What many power cuts after these steps may leave."""
    left = []
    for seed in range(300):
        disk = Disk()
        for entry in entries:
            disk.do(entry)
        after = disk.after_cut(random.Random(seed))
        left.append({Path(name).name: content for name, content in after.items()})
    return left


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
