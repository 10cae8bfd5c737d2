"""What a disk may have of the files of a folder when the power fails.

`flushed.h` has kept what was flushed (fsync), which is on the disk. Of what was written to a file
since then any blocks may be, in any order, and the file may be as long as it was made, with zeros
where a block is missing. The names in the folder are those that were flushed, or those of now.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

# That a disk writes as a whole, bytes.
BLOCK = 4096


def disk_beside(folder: Path) -> Path:
    """A new folder for what is flushed."""
    for name in ("files", "names"):
        (folder / name).mkdir(parents=True)
    return folder


def leave_what_a_disk_has(folder: Path, disk: Path, seed: int) -> None:
    """Replace the content of a folder by what may be left of it after a power cut.

    Args:
        folder: that was empty when the program began.
        disk: what is on it for certain.
        seed: of what is drawn.
    """
    rng = random.Random(seed)
    now: dict[int, bytes] = {}  # content of each file, by the inode of what was kept of it
    flushed: dict[str, Path] = {}
    for path in folder.iterdir():
        kept = disk / "files" / str(path.stat().st_ino)
        kept.touch()
        now[kept.stat().st_ino] = path.read_bytes()
        flushed[path.name] = kept
    if rng.random() < 0.5:
        flushed = {path.name: path for path in (disk / "names").iterdir()}
    shutil.rmtree(folder)
    folder.mkdir()
    for name, kept in flushed.items():
        content = kept.read_bytes()
        left = folder / name
        left.write_bytes(after_cut(content, now.get(kept.stat().st_ino, content), rng))
        left.chmod(0o600)


def after_cut(flushed: bytes, now: bytes, rng: random.Random) -> bytes:
    """What may be on the disk of a file."""
    part = rng.choice(("nothing", "all", "blocks"))
    if part != "blocks":
        return flushed if part == "nothing" else now
    size = len(rng.choice((flushed, now)))
    blocks = []
    for at in range(0, size, BLOCK):
        block = rng.choice((flushed, now))[at : at + BLOCK]
        blocks.append(block.ljust(BLOCK, b"\0"))
    return b"".join(blocks)[:size]
