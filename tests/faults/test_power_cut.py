"""That a power cut takes away what it may, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

from power_cut import BLOCK, Disk, Entry, Step

FOLDER = Path("/folder")


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
