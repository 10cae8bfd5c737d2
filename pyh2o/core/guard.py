"""Refuses in time what would end the process: one small check before native memory is used."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BusyError, ClosedError, ForkedError, PyH2OError


class ModelGuard:
    """Says whether a model may be used, and whose turn it is to use its context.

    Attributes:
        lock: whoever holds it may use the context. It is free while a text waits for a batch.
        closed: whether nobody may use the model any more.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed = False
        self._process = os.getpid()

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

    @contextmanager
    def context(self) -> Iterator[None]:
        """Use the context: waits for others who do.

        Raises:
            PyH2OError: as `check` does.
        """
        self.check()
        with self.lock:
            self.check()  # the model may have been closed meanwhile
            yield


class TextGuard:
    """Lets one thread at a time use a text, and with it the context of its model.

        with guard:
            ...  # native memory

    The same thread may enter again, as callbacks do.
    """

    def __init__(self, model: ModelGuard) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._depth = 0  # how often the text's thread has the context

    def __enter__(self) -> None:
        """Begin to use the text: waits for other texts that use the context.

        Raises:
            BusyError: another thread uses the text.
            PyH2OError: as for `ModelGuard.check`.
        """
        self._enter_text()
        self._model.lock.acquire()
        self._depth += 1
        try:
            self._model.check()  # the model may have been closed meanwhile
        except PyH2OError:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """End to use it."""
        self._depth -= 1
        self._model.lock.release()
        self._lock.release()

    def _enter_text(self) -> None:
        self._model.check()
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "the model is in use by another thread: let the threads take turns (with a "
                "threading.Lock), or load the model once for each"
            )

    @contextmanager
    def without_context(self) -> Iterator[None]:
        """Use the text and the model, but not the context, which others may use meanwhile.

        Raises:
            PyH2OError: as entering does.
        """
        self._enter_text()
        depth, self._depth = self._depth, 0
        for _ in range(depth):
            self._model.lock.release()
        try:
            self._model.check()
            yield
        finally:
            for _ in range(depth):
                self._model.lock.acquire()
            self._depth = depth
            self._lock.release()

    def wait(self) -> None:
        """Until no other thread uses the text."""
        with self._lock:
            pass
