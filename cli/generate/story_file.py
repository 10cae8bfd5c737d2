"""The file of a story, which grows while it is written, and never costs the user another text.

Beside it lie its checkpoint, which `--resume` goes on from, the archive of that, and its records,
one JSON line for each checkpoint.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pyh2o.system import archives
from pyh2o.system.files import flush_to_disk, replacement, try_lock
from pyh2o.system.home import expanded

from ..errors import InputError
from ..terminal.terminal import terminal
from ..text_files import check_folder, decoded

CHECKPOINT = ".h2o"
RECORDS = ".jsonl"
# How the name of a file begins until all of the text is in it.
TEMPORARY = ".pyh2o-story-"


class StoryFile:
    """A context manager around the file of `--output`, as a new story or a resumed one opens it.

    Attributes:
        name: the file as it was given.
        path: the file, with symbolic links followed.
        written: whether there is any text.
    """

    _file: BinaryIO

    def __init__(self, path: Path) -> None:
        """Check the place before a model is loaded for it.

        Raises:
            InputError: the file cannot be written.
        """
        self.name = path
        given = expanded(path)
        self.path = given.resolve()
        self.written = False
        if given.exists() and not given.is_file():
            raise InputError(f"{self.name} is no file: give another --output, or none for stdout")
        check_folder("--output", self.path.parent)

    @property
    def checkpoint(self) -> Path:
        """The session file beside it."""
        return beside(self.path, CHECKPOINT)

    @property
    def n_bytes(self) -> int:
        """Bytes of the text so far."""
        return self._file.tell()

    def __enter__(self) -> StoryFile:
        self._file = self._open()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # After a failed write closing fails alike; the first error is the one to show.
        failing: AbstractContextManager[Any] = suppress(OSError) if error else self._disk_errors()
        with failing, self._file:
            flush_to_disk(self._file)

    def write(self, text: str) -> None:
        """Append text; it is in the file when this returns.

        Raises:
            InputError: the disk is full or broken.
        """
        self.written = self.written or bool(text)
        with self._disk_errors():
            self._file.write(text.encode())
            self._file.flush()

    def sync(self) -> None:
        """Make what was written survive a power cut; otherwise as `write`."""
        with self._disk_errors():
            flush_to_disk(self._file)

    def record(self, record: dict[str, Any]) -> None:
        """Append a line to the records; one that a crash or a power cut has damaged is dropped."""
        with beside(self.path, RECORDS).open("ab+") as file:
            file.seek(0)
            content = file.read()
            begin = content.rfind(b"\n", 0, -1) + 1
            # zeros are what a disk has not written when the power fails
            if b"\0" in content[begin:] or not content.endswith(b"\n"):
                file.truncate(begin)
            file.write(f"{json.dumps(record)}\n".encode())
            flush_to_disk(file)

    def settle(self) -> None:
        """The text ends here: nothing that an earlier run wrote comes after it."""

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

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Within it, a file that cannot be written is told with what to do about it."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot write {self.name}: {error.strerror}; what is in it stays: make room and "
                "go on with --resume, or give another --output"
            ) from None


class NewStoryFile(StoryFile):
    """The file of a new story; one without any text goes again."""

    def __init__(self, path: Path) -> None:
        """As for any story; also an InputError where there is one."""
        super().__init__(path)
        for suffix in ("", CHECKPOINT, f"{CHECKPOINT}{archives.SUFFIX}", RECORDS):
            found = beside(self.path, suffix)
            # an empty file is what a run that was killed leaves
            if os.path.lexists(found) and (suffix or found.stat().st_size):
                raise self._exists(suffix)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            if not self.written:
                self.path.unlink(missing_ok=True)
                self.checkpoint.unlink(missing_ok=True)
                archives.remove_of_session(self.checkpoint)

    def _exists(self, suffix: str) -> InputError:
        resume = "go on with it with --resume, " if self.checkpoint.exists() else ""
        return InputError(
            f"{beside(self.name, suffix)} exists: {resume}give another --output, or remove it"
        )

    def _open(self) -> BinaryIO:
        file = self.path.open("ab")
        self._lock(file)
        if file.tell():  # another program has made it since the check
            file.close()
            raise self._exists("")
        return file


class ResumedStoryFile(StoryFile):
    """The file of a story that is gone on with, whatever has become of it since.

    Text that came after the checkpoint comes again. The file keeps it until then, and if something
    else comes, it is kept beside the file.
    """

    def __init__(self, path: Path) -> None:
        """As for any story; also an InputError where it has no checkpoint."""
        super().__init__(path)
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
        content = self._content()
        if self._is_known(content):
            return None
        # An editor ends its files with a line break.
        self._text = content.removesuffix(b"\n")
        self._end = content[len(self._text) :]
        self.written = True
        return None if self._text == text.encode() else self._text.decode()

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
        if self._rest.strip() and self._end is None:
            aside = beside(self.path, f".{secrets.token_hex(4)}.old")
            with aside.open("xb") as file:
                file.write(self._rest)
                flush_to_disk(file)
            terminal.say(
                f"what {self.path.name} had after the checkpoint, and did not come again, is kept "
                f"as {aside}"
            )
        if self._rest:
            self._file.truncate()
        self._rest, self._end = b"", None

    def _content(self) -> bytes:
        """Return the file's text; an editor's CRLF and byte order mark do not count as an edit."""
        content = self.path.read_bytes() if self.path.exists() else b""
        return content if self._is_known(content) else decoded(content, str(self.name)).encode()

    def _is_known(self, content: bytes) -> bool:
        """Whether the file has the text that is expected, or none at all, which then comes back."""
        rest = content.removeprefix(self._text)
        begins = content.startswith(self._text)
        return not content.strip() or (begins and (self._end is None or self._end.startswith(rest)))

    def _open(self) -> BinaryIO:
        self._restore()
        file = self.path.open("r+b")
        self._lock(file)
        content = file.read()
        if not (self._is_known(content) and content.startswith(self._text)):
            file.close()
            raise InputError(f"{self.name} was changed just now: give the command again")
        file.seek(len(self._text))
        self._rest = content[len(self._text) :]
        return file

    def _restore(self) -> None:
        """Write the text again if it is missing, or has marks of an editor on Windows.

        All of it at once: a part would be taken for an edit.
        """
        content = self._content()
        whole = content if content.strip() else self._text
        mode = None
        if self.path.exists():
            if whole == self.path.read_bytes() or not self._is_known(whole):
                return
            mode = stat.S_IMODE(self.path.stat().st_mode)
        with self._disk_errors(), replacement(self.path, prefix=TEMPORARY, mode=mode) as file:
            file.write(whole)


def beside(path: Path, suffix: str) -> Path:
    """The file of that name with the suffix added."""
    return path.with_name(path.name + suffix)
