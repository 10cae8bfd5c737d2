"""What a disk may have of the files of a program when the power fails.

`disk_log.h` notes what the program does. What was flushed (fsync) is on the disk. Of what was
written to a file since then any blocks may be, in any order, and the file may be as long as it was
made, with zeros where a block is missing. Of what was done to the names in a folder since that was
flushed a beginning is on the disk: all current file systems keep the order. The models of SQLite's
tests are alike (sqlite.org/testing.html, "Crash Testing").
"""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

# As in disk_log.h.
HEAD = struct.Struct("=6Q")
# That a disk writes as a whole, bytes.
BLOCK = 4096


class Step(IntEnum):
    """What was done."""

    CREATE = 0
    WRITE = 1
    RESIZE = 2
    SYNC = 3
    RENAME = 4
    LINK = 5
    REMOVE = 6
    FOLDER = 7


NAMES = (Step.CREATE, Step.RENAME, Step.LINK, Step.REMOVE, Step.FOLDER)


@dataclass(frozen=True)
class Entry:
    """A step of the log.

    Attributes:
        step: which.
        file: the inode of the file, unless the step is one of names.
        offset: of a write; the new size.
        name, to: paths; `name` is "" but for names and the flush of a folder.
        data: that was written.
    """

    step: Step
    file: int
    offset: int
    name: str
    to: str
    data: bytes


@dataclass
class File:
    """The content of a file.

    Attributes:
        now: as the program sees it.
        flushed: what is on the disk for certain.
        changes: since then.
    """

    now: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    changes: list[Entry] = field(default_factory=list)

    def change(self, entry: Entry) -> None:
        """Something is written, or it gets another size."""
        apply(self.now, entry)
        self.changes.append(entry)

    def flush(self) -> None:
        """All of it is on the disk."""
        self.flushed = bytes(self.now)
        self.changes = []

    def after_cut(self, rng: random.Random) -> bytes:
        """What may be on the disk."""
        part = rng.choice(("nothing", "all", "beginning", "blocks"))
        if part == "nothing":
            return self.flushed
        if part == "all":
            return bytes(self.now)
        content = bytearray(self.flushed)
        if part == "beginning":
            for entry in self.changes[: rng.randint(0, len(self.changes))]:
                apply(content, entry)
            return bytes(content)
        for entry in self.changes:
            for block in blocks(entry):
                if rng.random() < 0.5:
                    apply(content, block)
        if rng.random() < 0.5:
            resize(content, len(self.now))
        return bytes(content)


class Disk:
    """The folder of a program, which was empty when the log began."""

    def __init__(self) -> None:
        self.files: dict[int, File] = {}
        # of the folder's names those that are on the disk for certain, and the changes since
        self.names: dict[str, File] = {}
        self.changes: list[tuple[Entry, File | None]] = []

    def do(self, entry: Entry) -> None:
        """The next step of the log."""
        if entry.step in NAMES:
            if entry.step is Step.CREATE:
                self.files[entry.file] = File()
            self.changes.append((entry, self.files.get(entry.file)))
        elif entry.step is not Step.SYNC:
            self.files[entry.file].change(entry)
        elif entry.name:
            self._rename(len(self.changes))
        else:
            self.files[entry.file].flush()

    def after_cut(self, rng: random.Random) -> dict[str, bytes]:
        """What may be on the disk, by names; the program ends with it."""
        n = len(self.changes)
        self._rename(rng.choice((0, n, rng.randint(0, n))))
        return {name: file.after_cut(rng) for name, file in self.names.items()}

    def _rename(self, n: int) -> None:
        """The first changes of names are on the disk."""
        for entry, file in self.changes[:n]:
            if entry.step is Step.CREATE and file is not None:
                self.names[entry.name] = file
            elif entry.step is Step.REMOVE:
                self.names.pop(entry.name, None)
            elif entry.step in (Step.RENAME, Step.LINK) and entry.name in self.names:
                self.names[entry.to] = self.names[entry.name]
                if entry.step is Step.RENAME:
                    del self.names[entry.name]
        del self.changes[:n]


def leave_what_a_disk_has(folder: Path, log: Path, seed: int) -> None:
    """Replace the content of a folder by what may be left of it after a power cut.

    Args:
        folder: that was empty when the log began.
        log: of what was done to it until the cut.
        seed: of what is drawn.
    """
    disk = Disk()
    for entry in entries(log.read_bytes()):
        disk.do(entry)
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in disk.after_cut(random.Random(seed)).items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)


def entries(log: bytes) -> Iterator[Entry]:
    """The steps of a log; the last one may be cut off."""
    at = 0
    while at + HEAD.size <= len(log):
        step, file, offset, *sizes = HEAD.unpack_from(log, at)
        at += HEAD.size
        parts = []
        for size in sizes:
            parts.append(log[at : at + size])
            at += size
        if at <= len(log):
            name, to, data = parts
            yield Entry(Step(step), file, offset, name.decode(), to.decode(), data)


def apply(content: bytearray, entry: Entry) -> None:
    """Write, or change the size."""
    if entry.step is Step.RESIZE:
        resize(content, entry.offset)
        return
    end = entry.offset + len(entry.data)
    resize(content, max(end, len(content)))
    content[entry.offset : end] = entry.data


def resize(content: bytearray, size: int) -> None:
    """What is new are zeros."""
    del content[size:]
    content.extend(bytes(size - len(content)))


def blocks(entry: Entry) -> Iterator[Entry]:
    """The parts of a write that lie in different blocks of the disk."""
    if entry.step is not Step.WRITE:
        yield entry
        return
    begin = 0
    while begin < len(entry.data):
        at = entry.offset + begin
        end = begin + BLOCK - at % BLOCK
        yield Entry(entry.step, entry.file, at, "", "", entry.data[begin:end])
        begin = end
