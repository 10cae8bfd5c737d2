"""A story file that grows while it is written, and never costs the user another text.

Beside it lie its checkpoint, which `--resume` goes on from, and its records, one JSON line for each
checkpoint.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pyh2o.system.files import flush_to_disk, try_lock
from pyh2o.system.home import expanded

from ..errors import InputError

CHECKPOINT = ".h2o"
RECORDS = ".jsonl"


class StoryFile:
    """A context manager around the file of `--output`, as a new story or a resumed one opens it.

    Attributes:
        name: the file as it was given.
        path: the file, with symbolic links followed.
        special: whether it is a device or a pipe, which has no checkpoints.
        aside: where text is kept that was in the file before and is needed still, or None.
        written: whether there is any text.
    """

    def __init__(self, path: Path) -> None:
        """Check the place before a model is loaded for it.

        Raises:
            InputError: the file cannot be written.
        """
        self.name = path
        given = expanded(path)
        self.special = given.exists() and not given.is_file()
        # A link such as /dev/stdout may lead to a pipe that has no name in any folder.
        self.path = given if self.special else given.resolve()
        self.aside: Path | None = None
        self.written = False
        self._file: BinaryIO | None = None
        folder = self.path.parent
        if self.path.is_dir():
            raise InputError(f"{self.name} is a folder: give --output the name of a file")
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}: create it, or give another --output")
        # A device or a pipe is written in place; anything else is created in its folder.
        place = self.path if self.special else folder
        if not os.access(place, os.W_OK):
            raise InputError(f"{place} is not writable: give --output another folder")

    @property
    def checkpoint(self) -> Path:
        """The session file beside it."""
        return beside(self.path, CHECKPOINT)

    def __enter__(self) -> StoryFile:
        self._file = self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            with self._file as opened:
                self._sync(opened)
        except OSError as failure:
            # After a failed write closing fails alike; the first error is the one to show.
            if error is None:
                raise self._unwritable(failure) from None

    def write(self, text: str) -> None:
        """Append text; it is in the file when this returns.

        Raises:
            InputError: the disk is full or broken.
            BrokenPipeError: the reader of a pipe has gone.
        """
        assert self._file is not None
        self.written = self.written or bool(text)
        try:
            self._file.write(text.encode())
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from None

    def sync(self) -> None:
        """Make what was written survive a power cut.

        Raises:
            InputError: the disk is full or broken.
        """
        assert self._file is not None
        try:
            self._sync(self._file)
        except OSError as error:
            raise self._unwritable(error) from None

    def _sync(self, file: BinaryIO) -> None:
        if self.special:
            file.flush()
        else:
            flush_to_disk(file)

    def record(self, line: str) -> None:
        """Append a line to the records; one that a crash or a power cut has damaged is dropped.

        Raises:
            OSError: they cannot be written.
        """
        with beside(self.path, RECORDS).open("ab+") as file:
            _end_last_line(file)
            file.write(f"{line}\n".encode())
            flush_to_disk(file)

    def settle(self) -> None:
        """The text ends here: nothing that an earlier run wrote comes after it."""

    def complete(self) -> None:
        """The text is whole: an earlier one that it replaces is no longer needed."""

    def kept(self) -> str:
        """For a person: what is kept in `aside`."""
        return f"the earlier {self.path.name} is kept as {self.aside}"

    def _open(self) -> BinaryIO:
        raise NotImplementedError

    def _lock(self, file: BinaryIO) -> None:
        """Keep other runs off the file until it is closed, also by a crash."""
        if not try_lock(file):
            file.close()
            raise InputError(
                f"{self.name} is being written by another run: wait for its end, or give another "
                "--output"
            )

    def _unwritable(self, error: OSError) -> InputError:
        go_on = "" if self.special else " and go on with --resume"
        return InputError(
            f"cannot write {self.name}: {error.strerror}; what is in it stays: make room{go_on}, "
            "or give another --output"
        )


def beside(path: Path, suffix: str) -> Path:
    """The file of that name with the suffix added."""
    return path.with_name(path.name + suffix)


def new_name(path: Path) -> Path:
    """A name beside the file that no other file has."""
    return beside(path, f".{secrets.token_hex(4)}.old")


def _end_last_line(file: BinaryIO) -> None:
    """Drop a last line of JSON that is not whole, and end one that somebody has edited."""
    file.seek(0)
    content = file.read()
    begin = content.rfind(b"\n", 0, -1) + 1
    line = content[begin:]
    if b"\0" in line:  # what a disk has not written when the power fails
        file.truncate(begin)
    elif line and not line.endswith(b"\n"):
        try:
            json.loads(line)
        except ValueError:
            file.truncate(begin)
        else:
            file.write(b"\n")
