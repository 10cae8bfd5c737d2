"""Refuses in time what would end the process: one small check before native memory is used."""

from __future__ import annotations

import os
import threading

from ..errors import BusyError, ClosedError, ForkedError


class Guard:
    """Lets one thread at a time, of the process that loaded a model, use it until it is closed.

        with guard:
            ...  # native memory

    The same thread may enter again, as callbacks do.

    Attributes:
        closed: whether nobody may enter any more.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.closed = False

    @property
    def forked(self) -> bool:
        """Whether another process loaded the model."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Refuse a use that is wrong for whichever thread.

        Raises:
            ClosedError: the model was closed.
            ForkedError: another process loaded it.
        """
        if self.closed:
            raise ClosedError("the model is closed: load it again")
        if self.forked:
            raise ForkedError(
                f"the model was loaded by process {self._process}, from which this one was forked: "
                "load it in the process that uses it, or start processes with "
                "multiprocessing.set_start_method('spawn')"
            )

    def close(self) -> None:
        """Let nobody in any more."""
        self.closed = True

    def __enter__(self) -> None:
        """Begin to use the model.

        Raises:
            BusyError: another thread uses it.
            PyH2OError: as for `check`.
        """
        self.check()
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "the model is in use by another thread: let the threads take turns (with a "
                "threading.Lock), or load the model once for each"
            )

    def __exit__(self, *error: object) -> None:
        """End to use it."""
        self._lock.release()
