"""The results of a batch: in a journal as they finish, finally in the order of the requests.

The journal of the results NAME is NAME.partial. Its first line identifies the batch, each other
line is a result. A result is flushed to disk before the next one is added, so a crash or a full
disk loses only the requests in flight.
"""

from __future__ import annotations

import contextlib
import io
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BatchError
from ..sessions.records import record_of
from ..system.files import flush_to_disk, replacement, sync_folder, try_lock
from .answering import RequestDefaults, failed
from .reading import BatchInput

if TYPE_CHECKING:
    from .local import LocalRunner
    from .on_ray import RayRunner

SUFFIX = ".partial"
# Key of the first line, with the version of the format.
FORMAT = "pyh2o batch 1"

_BEGINNING = f'{{"{FORMAT}": '.encode()
_PREFIX = ".pyh2o-batch-"


@dataclass(frozen=True)
class BatchHead:
    """What the results of a batch depend on; it must be the same to resume the batch.

    Attributes:
        input: hash of the file of requests.
        model: size and hash of the model file.
        replaces: whether the results may replace an existing file.
    """

    input: str
    model: dict[str, Any]
    settings: dict[str, Any]
    defaults: RequestDefaults
    replaces: bool

    @classmethod
    def of(
        cls,
        batch: BatchInput,
        runner: LocalRunner | RayRunner,
        defaults: RequestDefaults,
        *,
        replaces: bool,
    ) -> BatchHead:
        model = {name: runner.model[name] for name in ("bytes", "sha256")}
        return cls(batch.sha256, model, runner.settings, defaults, replaces)

    def difference(self, other: BatchHead) -> str:
        """Describe the first difference between two batches; "" if there is none."""
        if self.input != other.input:
            return "a different input"
        if self.model != other.model:
            return "a different model"
        mine, theirs = self._values(), other._values()
        for name in sorted({*mine, *theirs}):
            values = [json.dumps(each.get(name)) for each in (mine, theirs)]
            if values[0] != values[1]:
                return f"{name} {values[0]} instead of {values[1]}"
        return ""

    def _values(self) -> dict[str, Any]:
        defaults = asdict(self.defaults)
        return {**self.settings, **defaults.pop("sampling"), **defaults}


@dataclass(frozen=True)
class _Entry:
    start: int
    size: int
    failed: bool


class Journal:
    """The journal of a file of results; a context manager. `head` is None in a new journal."""

    def __init__(self, results: Path) -> None:
        """Check the path of the results; nothing is opened yet."""
        self.path = results.with_name(results.name + SUFFIX)
        self.head: BatchHead | None = None
        self._results = results
        self._entries: dict[int, _Entry] = {}
        self._size = 0
        # Keep the permissions of a file that is replaced: it may be private.
        self._mode = stat.S_IMODE(results.stat().st_mode) if results.exists() else None
        folder = results.parent
        if results.exists() and not results.is_file():
            raise BatchError(f"{results} is not a regular file: give another name for the results")
        if not folder.is_dir():
            raise BatchError(f"the folder {folder} does not exist: create it, or give another one")

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    @property
    def n_done(self) -> int:
        return len(self._entries)

    @property
    def n_failed(self) -> int:
        return sum(entry.failed for entry in self._entries.values())

    # ---------------------------------------------------------------------------------------------
    # Opening
    # ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Journal:
        try:
            # unbuffered: a buffer would try again to write what a full disk has refused
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise BatchError(
                f"cannot write {self.path}: {error.strerror}; give another name for the results"
            ) from None
        try:
            if not try_lock(self._file):  # held until the process ends, even by a crash
                raise BatchError(
                    f"another run is writing {self.path}: wait until it ends, or give another name "
                    "for the results"
                )
            if self._mode is not None:
                with contextlib.suppress(OSError):  # file systems without permissions
                    self.path.chmod(self._mode | stat.S_IWUSR)
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._size == 0:
            self._remove()
        with contextlib.suppress(OSError):  # all results are flushed already
            self._file.close()

    def _read(self) -> None:
        """Read the head and the results, except damaged and truncated lines."""
        self._file.seek(0)
        reader = io.BufferedReader(self._file)
        for line in reader:
            is_whole = line.endswith(b"\n")
            if not is_whole and (self.head is not None or _may_be_head(line)):
                break
            if self.head is None:
                self.head = self._read_head(line)
            else:
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    number, result = json.loads(line)
                    if type(number) is int:
                        self._entries[number] = _Entry(self._size, len(line), failed(result))
            self._size += len(line)
        reader.detach()

    def _read_head(self, line: bytes) -> BatchHead:
        try:
            return record_of(BatchHead, json.loads(line)[FORMAT])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise BatchError(
                f"{self.path} is not a journal that this version of pyh2o can read: move it away, "
                "or give another name for the results"
            ) from None

    # ---------------------------------------------------------------------------------------------
    # Writing
    # ---------------------------------------------------------------------------------------------

    def start(self, head: BatchHead, *, restart: bool) -> None:
        """Resume a batch or start it; `restart` drops the existing results."""
        if self.head is not None and not restart:
            if difference := self.head.difference(head):
                raise BatchError(
                    f"{self.path} has results of a batch with {difference}: use the same ones, or "
                    "start over with force (--force)"
                )
            return
        self._entries = {}
        self._size = 0
        self._append(json.dumps({FORMAT: asdict(head)}))
        sync_folder(self.path.parent)
        self.head = head

    def add(self, number: int, result: Mapping[str, Any]) -> None:
        """Append the result of a request and flush it to disk; earlier results survive errors."""
        start = self._size
        self._append(json.dumps([number, result], ensure_ascii=False))
        self._entries[number] = _Entry(start, self._size - start, failed(dict(result)))

    def _append(self, line: str) -> None:
        data = f"{line}\n".encode()
        try:
            self._file.truncate(self._size)  # a partial line that a failed write has left
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            flush_to_disk(self._file)
        except OSError as error:
            raise self._unwritable(error) from None
        self._size += len(data)

    def finish(self, n_requests: int) -> None:
        """Write the results in the order of the requests, and remove the journal."""
        try:
            with replacement(self._results, prefix=_PREFIX, mode=self._mode) as file:
                for number in range(n_requests):
                    entry = self._entries[number]
                    self._file.seek(entry.start)
                    _, result = json.loads(self._file.read(entry.size))
                    file.write(f"{json.dumps(result, ensure_ascii=False)}\n".encode())
        except OSError as error:
            raise self._unwritable(error) from None
        self._size = 0
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> BatchError:
        return BatchError(
            f"cannot write the results: {error.strerror}; the {len(self._entries):,} finished ones "
            f"stay in {self.path}: free some space, and repeat the same command"
        )


def _may_be_head(line: bytes) -> bool:
    """Whether a line may be a head that a crash has truncated, or a power cut filled with zeros."""
    return _BEGINNING.startswith(line[: len(_BEGINNING)]) or not line.strip(b"\0")
