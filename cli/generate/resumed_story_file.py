"""The file of a story that is gone on with, whatever has become of it since."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from pyh2o.system.files import flush_to_disk, replacement

from ..errors import InputError
from .story_file import CHECKPOINT, StoryFile, beside, new_name

# How the name of a file begins until all of the text is in it.
TEMPORARY = ".pyh2o-story-"


class ResumedStoryFile(StoryFile):
    """The file of a story that is gone on with.

    Text that came after the checkpoint comes again. The file keeps it until then, and if something
    else comes, it is kept beside the file.
    """

    def __init__(self, path: Path) -> None:
        """Check the place before a model is loaded for it.

        Raises:
            InputError: the file cannot be written, is no file, or has no checkpoint.
        """
        super().__init__(path)
        if self.special:
            raise InputError(f"{self.name} is not a file: only a story in a file can be resumed")
        if not self.checkpoint.exists():
            cure = "start without --resume"
            if self.path.exists():
                cure = f"go on after its text with --prompt-file {self.name} and another --output"
            raise InputError(f"there is no checkpoint {beside(self.name, CHECKPOINT)}: {cure}")
        self._text = b""
        self._end: bytes | None = None
        self._rest = b""

    def expect(self, text: str, end: str | None) -> str | None:
        """Compare the file, before it is opened, with what the checkpoint knows of it.

        Args:
            text: that it begins with; it gets back what is missing of that.
            end: what comes after that; None if anything may, because the story was cut off.

        Returns:
            What somebody has made of the text, or None if it is the same.

        Raises:
            InputError: it was made something that is no text.
        """
        self._text = text.encode()
        self._end = None if end is None else end.encode()
        self.written = bool(text)
        content = self.path.read_bytes() if self.path.exists() else b""
        if self._is_known(content):
            return None
        # An editor ends its files with a line break.
        self._text = content.removesuffix(b"\n")
        self._end = content[len(self._text) :]
        self.written = True
        if self._text == text.encode():
            return None
        try:
            return self._text.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.name} was edited, and is not UTF-8 text (byte {error.start}): save it as "
                "UTF-8"
            ) from None

    def _is_known(self, content: bytes) -> bool:
        """Whether the file has the text that is expected, or none at all, which then comes back."""
        rest = content.removeprefix(self._text)
        begins = content.startswith(self._text)
        return not content.strip() or (begins and (self._end is None or self._end.startswith(rest)))

    def _open(self) -> BinaryIO:
        file = self.path.open("r+b" if self.path.exists() else "x+b")
        self._lock(file)
        try:
            content = file.read()
            if not self._is_known(content):
                raise InputError(f"{self.name} was changed just now: give the command again")
            is_there = bool(content.strip()) or content == self._text
            if not is_there:
                self._bring_back(file)
        except BaseException:
            file.close()
            raise
        if not is_there:
            file.close()
            return self._open()
        file.seek(len(self._text))
        self._rest = content[len(self._text) :]
        return file

    def _bring_back(self, file: BinaryIO) -> None:
        """Have the text in the file again, all of it at once: a part would be taken for an edit."""
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        try:
            with replacement(self.path, prefix=TEMPORARY, mode=mode) as whole:
                whole.write(self._text)
        except OSError as error:
            raise self._unwritable(error) from None

    def write(self, text: str) -> None:
        """Write text over the same text of the run before, or behind it."""
        data = text.encode()
        if self._end is not None or not (
            self._rest.startswith(data) or data.startswith(self._rest)
        ):
            self.settle()
        self._rest = self._rest[len(data) :]
        super().write(text)

    def settle(self) -> None:
        """Take away what comes after this place, and keep it aside unless it was the known end."""
        assert self._file is not None
        if self._rest.strip() and self._end is None:
            self.aside = new_name(self.path)
            with self.aside.open("xb") as file:
                file.write(self._rest)
                flush_to_disk(file)
        if self._rest:
            self._file.truncate()
        self._rest, self._end = b"", None

    def kept(self) -> str:
        """For a person: what is kept in `aside`."""
        return (
            f"what {self.path.name} had after the checkpoint, and did not come again, is kept as "
            f"{self.aside}"
        )
