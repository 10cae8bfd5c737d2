"""The file of a new story, which may take the place of an earlier one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pyh2o.system.archives import SUFFIX, remove_of_session

from ..errors import InputError
from .story_file import CHECKPOINT, RECORDS, StoryFile, beside, new_name

# A story, and what lies beside it.
BESIDE = ("", CHECKPOINT, f"{CHECKPOINT}{SUFFIX}", RECORDS)


class NewStoryFile(StoryFile):
    """The file of a new story.

    A file that is to be replaced is moved aside first, with its checkpoint and its records. It
    comes back if nothing was written, is removed once the new text is complete, and stays if the
    new text was cut short.

    Attributes:
        stays: whether the new file stays if nothing was written: it has a checkpoint to go on from.
    """

    def __init__(self, path: Path, replace: bool) -> None:
        """Check the place before a model is loaded for it.

        Raises:
            InputError: the file cannot be written, or exists and is not to be replaced.
        """
        super().__init__(path)
        self.stays = False
        self._replace = replace
        self._earlier: Path | None = None
        self._complete = False
        if not replace and not self.special:
            for suffix in BESIDE:
                if beside(self.path, suffix).exists() and not (suffix == "" and self._is_empty()):
                    raise self._exists(suffix)

    def _exists(self, suffix: str) -> InputError:
        resume = "go on with it with --resume, " if self.checkpoint.exists() else ""
        return InputError(
            f"{beside(self.name, suffix)} exists: {resume}give another --output, or replace it "
            "with --force"
        )

    def _open(self) -> BinaryIO:
        if self.special:
            return self.path.open("wb")
        try:
            if self._replace:
                self._move_aside()
            file = self._create()
        except OSError:
            self._bring_back()
            raise
        self._lock(file)
        if self.aside is not None:
            shutil.copymode(self.aside, self.path)
        return file

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if not self.written and not self.stays and not self.special:
            self.path.unlink(missing_ok=True)
            self.checkpoint.unlink(missing_ok=True)
            remove_of_session(self.checkpoint)
            self._bring_back()
        elif self._complete and self._earlier is not None:
            for path in _files_of(self._earlier).values():
                path.unlink()
            self.aside = None

    def complete(self) -> None:
        """The text is whole: the earlier file is no longer needed."""
        self._complete = True

    def _create(self) -> BinaryIO:
        """The new file, or an empty one that is there, such as a run that was killed leaves."""
        try:
            return self.path.open("xb")
        except FileExistsError:
            file = self.path.open("r+b")
        if file.seek(0, os.SEEK_END):  # another program has made it since the check
            file.close()
            raise self._exists("")
        return file

    def _is_empty(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == 0

    def _move_aside(self) -> None:
        if self.path.is_file():
            with self.path.open("rb") as file:
                self._lock(file)
            self.aside = new_name(self.path)
        self._earlier = self.aside or new_name(self.path)
        _move(self.path, self._earlier)

    def _bring_back(self) -> None:
        if self._earlier is not None:
            _move(self._earlier, self.path)
        self.aside = None


def _move(source: Path, target: Path) -> None:
    """Rename a story, its checkpoint and its records, as many of them as there are."""
    for suffix, path in _files_of(source).items():
        path.rename(beside(target, suffix))


def _files_of(story: Path) -> dict[str, Path]:
    """A story and what lies beside it, as much as there is; names may be too long to be there."""
    files = {suffix: beside(story, suffix) for suffix in BESIDE}
    return {suffix: path for suffix, path in files.items() if os.path.lexists(path)}
