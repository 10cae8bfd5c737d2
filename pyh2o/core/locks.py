"""Locks that protect native memory: of a model and of each of its texts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BusyError, ClosedError, ForkedError, PyH2OError


class ModelLock:
    """The lock of a model's context, with checks that the model is still usable.

    Attributes:
        context_lock: to hold while the context is used; released while a text waits for a batch.
    """

    def __init__(self) -> None:
        self.context_lock = threading.RLock()
        self.closed = False
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise an error if no thread may use the model."""
        if self.closed:
            raise ClosedError("the model is closed: load it again")
        if self.forked:
            raise ForkedError(
                f"the model was loaded by the parent process {self._process}: load it in the "
                "process that uses it, or start processes with "
                "multiprocessing.set_start_method('spawn')"
            )

    @contextmanager
    def context(self) -> Iterator[None]:
        self.check()
        with self.context_lock:
            self.check()  # the model may have been closed meanwhile
            yield


class TextLock:
    """A re-entrant lock of a text and of the context of its model, for one thread at a time."""

    def __init__(self, model: ModelLock) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._depth = 0  # how often the text's thread holds the context

    def __enter__(self) -> None:
        """Lock the text, and wait until no other text uses the context."""
        self._enter_text()
        self._model.context_lock.acquire()
        self._depth += 1
        try:
            self._model.check()  # the model may have been closed meanwhile
        except PyH2OError:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._model.context_lock.release()
        self._lock.release()

    def _enter_text(self) -> None:
        self._model.check()
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "the model is in use by another thread: share it with a threading.Lock, or load it "
                "once per thread"
            )

    @contextmanager
    def without_context(self) -> Iterator[None]:
        """Hold the text and the model, but release the context to other texts."""
        self._enter_text()
        depth, self._depth = self._depth, 0
        for _ in range(depth):
            self._model.context_lock.release()
        try:
            self._model.check()
            yield
        finally:
            for _ in range(depth):
                self._model.context_lock.acquire()
            self._depth = depth
            self._lock.release()

    def wait(self) -> None:
        """Wait until no other thread uses the text."""
        with self._lock:
            pass
