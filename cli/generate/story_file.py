"""The file of a story, which grows while it is written and never loses text of the user.

Next to it are its checkpoint for `--resume`, the KV cache of the checkpoint, and its records, one
JSON line per checkpoint.
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

from pyh2o.system.files import flush_to_disk, replacement, try_lock
from pyh2o.system.home import expanded

from ..errors import InputError
from ..terminal.terminal import terminal
from ..text_files import check_folder, decoded

CHECKPOINT = ".h2o"
KV = ".h2o.kv"
RECORDS = ".jsonl"
# Prefix of temporary files.
TEMPORARY = ".pyh2o-story-"


class StoryFile:
    """A context manager for the file of `--output`.

    Attributes:
        name: the path as given.
        path: the path with symbolic links resolved.
        written: whether the file has text.
    """

    _file: BinaryIO

    def __init__(self, path: Path) -> None:
        """Check the path, before a model is loaded.

        Raises:
            InputError: the file cannot be written.
        """
        self.name = path
        given = expanded(path)
        self.path = given.resolve()
        self.written = False
        if given.exists() and not given.is_file():
            raise InputError(
                f"{self.name} is not a regular file: give another --output, or remove --output for "
                "stdout"
            )
        check_folder("--output", self.path.parent)

    @property
    def checkpoint(self) -> Path:
        """Path of the session file."""
        return beside(self.path, CHECKPOINT)

    @property
    def n_bytes(self) -> int:
        """Size of the text so far."""
        return self._file.tell()

    def __enter__(self) -> StoryFile:
        self._file = self._open()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # after a failed write, closing fails too, but only the first error is reported
        failing: AbstractContextManager[Any] = suppress(OSError) if error else self._disk_errors()
        with failing, self._file:
            flush_to_disk(self._file)

    def write(self, text: str) -> None:
        """Append text and flush the file.

        Raises:
            InputError: the disk is full or broken.
        """
        self.written = self.written or bool(text)
        with self._disk_errors():
            self._file.write(text.encode())
            self._file.flush()

    def sync(self) -> None:
        """Write the text to disk, so that it survives a power cut.

        Raises:
            InputError: the disk is full or broken.
        """
        with self._disk_errors():
            flush_to_disk(self._file)

    def record(self, record: dict[str, Any]) -> None:
        """Append a line to the records, after removing a damaged last line."""
        with beside(self.path, RECORDS).open("ab+") as file:
            file.seek(0)
            content = file.read()
            begin = content.rfind(b"\n", 0, -1) + 1
            # a power cut leaves zeros for data that was not written
            if b"\0" in content[begin:] or not content.endswith(b"\n"):
                file.truncate(begin)
            file.write(f"{json.dumps(record)}\n".encode())
            flush_to_disk(file)

    def settle(self) -> None:
        """Remove text of an earlier run after the present position."""

    def _open(self) -> BinaryIO:
        raise NotImplementedError

    def _lock(self, file: BinaryIO) -> None:
        """Lock the file against other runs until it is closed or the process ends."""
        if not try_lock(file):
            file.close()
            raise InputError(
                f"another run is writing {self.name}: wait until it ends, or give another --output"
            )

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn an OSError inside the block into an InputError with a remedy."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot write {self.name}: {error.strerror}; its text is kept: free some space "
                "and continue with --resume, or give another --output"
            ) from None


class NewStoryFile(StoryFile):
    """The file of a new story, which is deleted if it has no text."""

    def __init__(self, path: Path) -> None:
        """Check the path; raise an InputError if a story exists."""
        super().__init__(path)
        for suffix in ("", CHECKPOINT, KV, RECORDS):
            found = beside(self.path, suffix)
            # a killed run may leave an empty file
            if os.path.lexists(found) and (suffix or found.stat().st_size):
                raise self._exists(suffix)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            if not self.written:
                self.path.unlink(missing_ok=True)
                self.checkpoint.unlink(missing_ok=True)
                beside(self.path, KV).unlink(missing_ok=True)

    def _exists(self, suffix: str) -> InputError:
        resume = "continue it with --resume, " if self.checkpoint.exists() else ""
        return InputError(
            f"{beside(self.name, suffix)} exists: {resume}give another --output, or remove it"
        )

    def _open(self) -> BinaryIO:
        file = self.path.open("ab")
        self._lock(file)
        if file.tell():  # another program has written it since the check
            file.close()
            raise self._exists("")
        return file


class ResumedStoryFile(StoryFile):
    """The file of a resumed story, possibly edited or damaged.

    Text after the checkpoint is generated again. The file keeps it until then. If other text is
    generated, the old text is moved to another file.
    """

    def __init__(self, path: Path) -> None:
        """Check the path; raise an InputError if there is no checkpoint."""
        super().__init__(path)
        if not self.checkpoint.exists():
            cure = "start without --resume"
            if self.path.exists():
                cure = f"continue its text with --prompt-file {self.name} and another --output"
            raise InputError(f"no such checkpoint {beside(self.name, CHECKPOINT)}: {cure}")
        self._text = b""
        self._end: bytes | None = None
        self._rest = b""

    def expect(self, text: str, end: str | None) -> str | None:
        """Compare the file with the checkpoint, before it is opened.

        Args:
            text: text of the checkpoint, which is restored if it is missing.
            end: expected text after that; None for any, because the run was interrupted.

        Returns:
            the edited text, or None without an edit.

        Raises:
            InputError: the file is not UTF-8 text.
        """
        self._text = text.encode()
        self._end = None if end is None else end.encode()
        self.written = bool(text)
        content = self._content()
        if self._is_known(content):
            return None
        # editors end files with a line break
        self._text = content.removesuffix(b"\n")
        self._end = content[len(self._text) :]
        self.written = True
        return None if self._text == text.encode() else self._text.decode()

    def write(self, text: str) -> None:
        """Write text, over the same text of the earlier run or at the end."""
        data = text.encode()
        if self._end is not None or not (
            self._rest.startswith(data) or data.startswith(self._rest)
        ):
            self.settle()
        self._rest = self._rest[len(data) :]
        super().write(text)

    def settle(self) -> None:
        """Remove text after the present position, and save it unless it is the expected end."""
        if self._rest.strip() and self._end is None:
            aside = beside(self.path, f".{secrets.token_hex(4)}.old")
            with aside.open("xb") as file:
                file.write(self._rest)
                flush_to_disk(file)
            terminal.say(
                f"text of {self.path.name} after the checkpoint that was not generated again is "
                f"saved as {aside}"
            )
        if self._rest:
            self._file.truncate()
        self._rest, self._end = b"", None

    def _content(self) -> bytes:
        """Return the file's text, without CRLF and byte order mark, which are not edits."""
        content = self.path.read_bytes() if self.path.exists() else b""
        return content if self._is_known(content) else decoded(content, str(self.name)).encode()

    def _is_known(self, content: bytes) -> bool:
        """Return whether the file has the expected text, or none at all."""
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
            raise InputError(f"{self.name} was just changed: run the command again")
        file.seek(len(self._text))
        self._rest = content[len(self._text) :]
        return file

    def _restore(self) -> None:
        """Write the text again if it is missing, or has CRLF or a byte order mark.

        The file is replaced atomically, as a part of the text would be treated as an edit.
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
    """Return the path with a suffix appended to the name."""
    return path.with_name(path.name + suffix)
