"""The file of a story's text, which can always be written again from the database."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pyh2o.system.files import flush_to_disk, try_lock
from pyh2o.system.home import expanded

from ..errors import InputError
from ..text_files import check_folder, decoded


class StoryFile:
    """The file of `--output`, which is opened by the first write.

    Attributes:
        name: the path as given.
        path: the path with symbolic links resolved.
    """

    def __init__(self, name: Path) -> None:
        """Check the path, before a model is loaded.

        Raises:
            InputError: the file cannot be written.
        """
        self.name = name
        given = expanded(name)
        self.path = given.resolve()
        if given.exists() and not given.is_file():
            raise InputError(
                f"{name} is not a regular file: give another --output, or remove --output for "
                "stdout"
            )
        check_folder("--output", self.path.parent)
        self._data = self.path.read_bytes() if self.path.exists() else b""
        self._text = b""  # the text before that of the next write
        self._file: BinaryIO | None = None

    @property
    def exists(self) -> bool:
        """Whether the file has text."""
        return bool(self._data)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def expect(self, text: str, end: str, crc: int | None, *, was_killed: bool) -> str | None:
        """Return the text of the file if it was edited; otherwise give it the text of the story.

        Args:
            text: text of the story.
            end: expected text after it.
            crc: result of the last `sync`; None for none.
            was_killed: whether the file may lack the end of the text.

        Raises:
            InputError: the file is not UTF-8 text.
        """
        self._text = text.encode()
        data = self._data.rstrip(b"\0")  # a power cut leaves zeros for data that was not written
        is_known = zlib.crc32(self._data) == crc or (was_killed and self._text.startswith(data))
        if not is_known:
            content = decoded(data, str(self.name))
            line = content.removesuffix("\n")  # editors end files with a line break
            end = end if end.endswith("\n") else f"{end}\n"
            is_whole = content.startswith(text) and end.startswith(content[len(text) :])
            if content.strip() and not is_whole and not (was_killed and text.startswith(line)):
                self._text = line.encode()
                return line
        if not self._data.startswith(self._text):
            self.write("")
        return None

    def write(self, text: str) -> None:
        """Append text.

        Raises:
            InputError: the disk is full or broken, or another run writes the file.
        """
        with self._disk_errors():
            file = self._file or self._open()
            file.write(text.encode())
            file.flush()

    def sync(self) -> int:
        """Write the text to disk, so that it survives a power cut; return the file's CRC-32."""
        with self._disk_errors():
            flush_to_disk(self._file or self._open())
            return zlib.crc32(self.path.read_bytes())

    def _open(self) -> BinaryIO:
        """Open the file with the text so far; at any time it holds a prefix of that."""
        self.path.touch()
        self._file = self.path.open("r+b")
        if not try_lock(self._file):
            raise InputError(
                f"another run is writing {self.name}: wait until it ends, or give another --output"
            )
        if self._file.read() != self._data:
            raise InputError(f"{self.name} was just changed: run the command again")
        if self._data.startswith(self._text):
            self._file.truncate(len(self._text))
            self._file.seek(0, os.SEEK_END)
        else:
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(self._text)
        return self._file

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn an OSError inside the block into an InputError with a remedy."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot write {self.name} ({error.strerror}): correct that and continue with "
                "--resume, or give another --output"
            ) from None
