"""A story file that grows while it is written, and never costs the user another file."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TextIO

from .errors import InputError


class StoryFile:
    """A context manager around the file of `--output`.

    A file that is to be replaced is moved aside first. It comes back if nothing was written, is
    removed once the new text is complete, and stays (`aside`) if the new text was cut short.

    Attributes:
        path: the file, with symbolic links followed.
        aside: where the earlier file is kept, or None.
        written: whether there is any text; if not, there is no file either.
    """

    def __init__(self, path: Path, replace: bool) -> None:
        """Check the place before a model is loaded for it.

        Raises:
            InputError: the file cannot be written, or exists and is not to be replaced.
        """
        self._name = path
        given = path.expanduser()
        self._special = given.exists() and not given.is_file()
        # A link such as /dev/stdout may lead to a pipe that has no name in any folder.
        self.path = given if self._special else given.resolve()
        self.aside: Path | None = None
        self._replace = replace
        self._complete = False
        self.written = False
        self._file: TextIO | None = None
        self._check()

    def _check(self) -> None:
        folder = self.path.parent
        if self.path.is_dir():
            raise InputError(f"{self._name} is a folder: give --output the name of a file")
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}: create it, or give another --output")
        if self.path.is_file() and not self._replace:
            raise self._exists()
        # A device or a pipe is written in place; anything else is created in its folder.
        place = self.path if self._special else folder
        if not os.access(place, os.W_OK):
            raise InputError(f"{place} is not writable: give --output another folder")

    def _exists(self) -> InputError:
        return InputError(f"{self._name} exists: give another --output, or replace it with --force")

    def __enter__(self) -> StoryFile:
        if self._replace and self.path.is_file():
            self.aside = _move_aside(self.path)
        try:
            self._file = self._open()
            if self.aside is not None:
                shutil.copymode(self.aside, self.path)
        except FileExistsError:
            raise self._exists() from None
        except OSError:
            self._bring_back()
            raise
        return self

    def _open(self) -> TextIO:
        if self._special:
            return self.path.open("w", encoding="utf-8", newline="\n")
        # "x" refuses a file that another program has made since the check.
        return self.path.open("x", encoding="utf-8", newline="\n")

    def write(self, text: str) -> None:
        """Append text; it is in the file when this returns.

        Raises:
            InputError: the disk is full or broken.
            BrokenPipeError: the reader of a pipe has gone.
        """
        assert self._file is not None
        self.written = self.written or bool(text)
        try:
            self._file.write(text)
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"cannot write {self._name}: {error.strerror}; what is in it stays: make room, or give "
            "another --output"
        )

    def complete(self) -> None:
        """The text is whole: the earlier file is no longer needed."""
        self._complete = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            with self._file as file:
                if not self._special:
                    os.fsync(file.fileno())
        except OSError as failure:
            # After a failed write closing fails alike; the first error is the one to show.
            if error is None:
                raise self._unwritable(failure) from None
        if not self.written and not self._special:
            self.path.unlink(missing_ok=True)
            self._bring_back()
        elif self._complete and self.aside is not None:
            self.aside.unlink()
            self.aside = None

    def _bring_back(self) -> None:
        if self.aside is not None:
            self.aside.replace(self.path)
            self.aside = None


def _move_aside(path: Path) -> Path:
    """Rename a file to a new name beside it that no other file has."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".old")
    os.close(handle)
    return path.replace(name)
