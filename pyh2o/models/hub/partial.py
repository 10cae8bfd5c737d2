"""A file on its way from the hub, and what is left of it for the next try."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from ...errors import ModelError
from ...system.files import flush_to_disk, try_lock
from ..folder import Progress, age_seconds, sha256_of
from .quantisations import HubFile

_PREFIX, _SUFFIX = ".hub-", ".part"
_KEPT_SECONDS = 7 * 24 * 3600


class Partial(io.BufferedWriter):
    """The file that a download is written to: it goes on at the end of what an earlier one left.

    Nobody else can write it meanwhile. With no byte in it, it is removed at the end.

    Args:
        folder: where it lies.
        file: what is to arrive.

    Raises:
        ModelError: another process is writing it.
    """

    def __init__(self, folder: Path, file: HubFile) -> None:
        self.path = folder / f"{_PREFIX}{file.sha256}{_SUFFIX}"
        self.file = file
        self.progress: Progress | None = None
        super().__init__(io.FileIO(self.path, "a"))
        if not try_lock(cast(IO[bytes], self)):
            self.close()
            raise ModelError(
                f"another program is fetching {file.name}: wait until it is done, or end it"
            )
        if self.tell() > file.bytes:
            self.seek(0)
            self.truncate()

    def write(self, data: Any) -> int:
        """Write what has arrived."""
        n_bytes = super().write(data)
        if self.progress is not None:
            self.progress(self.tell(), self.file.bytes)
        return n_bytes

    def check(self, progress: Progress | None) -> None:
        """See that all has arrived, and reached the disk.

        Raises:
            ModelError: it is not what the hub promised; it is then gone.
        """
        flush_to_disk(self)
        if sha256_of(self.path, progress) != self.file.sha256:
            self.path.unlink()
            raise ModelError(
                f"what arrived as {self.file.name} is not the hub's file (wrong hash): it was "
                "thrown away; try again"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # moved, or a full disk of which an error tells
            self.flush()
            if self.path.stat().st_size == 0:
                self.path.unlink()
        self.close()


def remove_old(folder: Path) -> None:
    """Remove what was left of downloads that nobody has gone on with for a week."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # the other fetch has ended
            if age_seconds(path) > _KEPT_SECONDS:
                # The clock may have been set meanwhile: one that is written is young.
                with path.open("rb") as file:
                    if try_lock(file):
                        path.unlink()
