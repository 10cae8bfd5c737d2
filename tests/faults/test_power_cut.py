"""That a power cut takes away what it may, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

from power_cut import BLOCK, after_cut, disk_beside, leave_what_a_disk_has


def test_what_was_not_flushed_may_be_gone_or_there_in_parts() -> None:
    old, new = b"o" * 2 * BLOCK, b"n" * 3 * BLOCK
    left = {after_cut(old, new, random.Random(seed)) for seed in range(300)}
    assert {old, new, new[:BLOCK] + old[BLOCK:], old[:BLOCK] + new[BLOCK:]} <= left
    assert {old + bytes(BLOCK), old[:BLOCK] + new[BLOCK : 2 * BLOCK] + bytes(BLOCK)} <= left
    assert all(set(content) <= set(b"on\0") for content in left)


def test_names_are_those_that_were_flushed_or_those_of_now(tmp_path: Path) -> None:
    """A new file has taken the place of an old one, and was not flushed."""
    left = set()
    for seed in range(30):
        folder, disk = tmp_path / f"folder{seed}", disk_beside(tmp_path / f"disk{seed}")
        folder.mkdir()
        (folder / "file").write_bytes(b"new")
        (disk / "names" / "file").write_bytes(b"old")
        leave_what_a_disk_has(folder, disk, seed)
        assert [path.name for path in folder.iterdir()] == ["file"]
        left.add((folder / "file").read_bytes())
    assert left == {b"old", b"new", b"", bytes(3)}
