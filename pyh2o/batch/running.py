"""Many requests at once, each in a thread, and their results as they end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from .reading import BatchRequest

# Seconds after which whoever waits for a result is asked whether to go on.
TICK = 0.1

Result = tuple[BatchRequest, dict[str, Any]]


class _StoppedError(BaseException):
    """An answer that is broken off."""


class BatchRun:
    """Has requests answered, so many at once."""

    def __init__(self, requests: Sequence[BatchRequest], n_at_once: int) -> None:
        """Nothing runs yet.

        Args:
            requests: in the order in which they begin.
            n_at_once: threads that answer them.
        """
        self._requests = iter(requests)
        self._n_threads = min(n_at_once, len(requests))
        self._turn = threading.Lock()
        self._stopped = threading.Event()
        # results, errors that end the run, and a None for each thread that has ended
        self._news: queue.Queue[Result | BaseException | None] = queue.Queue()

    def stop(self) -> None:
        """Break off the answers in the making; `results` ends when that has happened."""
        self._stopped.set()

    def check(self) -> None:
        """To be called while an answer is made: ends it after `stop`."""
        if self._stopped.is_set():
            raise _StoppedError

    def results(
        self, answer: Callable[[BatchRequest], dict[str, Any]]
    ) -> Generator[Result | None, None, None]:
        """Answer all requests.

        Args:
            answer: called for each request, in one of the threads.

        Yields:
            Each request with its answer as it ends, and None where nothing has ended for a while.

        Raises:
            BaseException: what `answer` raises; the other answers are broken off.
        """
        threads = [
            threading.Thread(target=self._work, args=(answer,), name=f"pyh2o request {i}")
            for i in range(self._n_threads)
        ]
        for thread in threads:
            thread.start()
        try:
            yield from self._ended()
        finally:
            self.stop()
            for thread in threads:
                thread.join()

    def _ended(self) -> Iterator[Result | None]:
        n_working = self._n_threads
        while n_working:
            try:
                news = self._news.get(timeout=TICK)
            except queue.Empty:
                yield None
                continue
            if isinstance(news, BaseException):
                raise news
            if news is None:
                n_working -= 1
            else:
                yield news

    def _work(self, answer: Callable[[BatchRequest], dict[str, Any]]) -> None:
        try:
            while not self._stopped.is_set() and (request := self._next()) is not None:
                self._news.put((request, answer(request)))
        except _StoppedError:
            pass
        except BaseException as error:
            self._news.put(error)
        self._news.put(None)

    def _next(self) -> BatchRequest | None:
        with self._turn:
            return next(self._requests, None)
