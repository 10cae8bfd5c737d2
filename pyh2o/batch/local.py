"""Runs a batch on an engine in this process."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from typing import Any

from ..cache.statistics import mib_text
from ..engine import Engine
from ..sessions.identity import model_identity, settings_identity
from .answering import Answers, RequestDefaults
from .reading import BatchRequest

# Interval in seconds at which `results` yields None if no request has finished.
TICK = 0.1

Result = tuple[BatchRequest, dict[str, Any]]


class _StoppedError(BaseException):
    """Cancels an answer."""


class LocalRunner:
    """Answers requests in this process."""

    def __init__(
        self, engine: Engine, requests: Sequence[BatchRequest], defaults: RequestDefaults
    ) -> None:
        """Prepare to answer these requests, one per slot at a time."""
        self.model = vars(model_identity(engine.model))
        self.settings = settings_identity(engine.model)
        self._engine = engine
        self._requests = iter(requests)
        self._stopped = threading.Event()
        self._answers = Answers(engine, defaults, self._check)

    @property
    def caches(self) -> str:
        """Number of caches and the memory of each."""
        return f"{self._engine.n_slots} x {mib_text(self._engine.report()[0].kv.bytes_total)} MiB"

    def stop(self) -> None:
        """Cancel the requests in flight; `results` ends after that."""
        self._stopped.set()

    def results(self) -> Generator[Result | None, None, None]:
        """Answer the requests.

        Yields:
            Each request with its answer when it finishes; None every `TICK` seconds without one.

        Raises:
            Exception: an error that no request has caused; the other requests are cancelled.
        """
        n_at_once = self._engine.n_slots
        with ThreadPoolExecutor(n_at_once, "pyh2o request") as pool:
            # twice as many as slots: no thread waits while the caller handles results
            first = islice(self._requests, 2 * n_at_once)
            asked = {pool.submit(self._answer, request): request for request in first}
            try:
                while asked:
                    done, _ = wait(asked, TICK, FIRST_COMPLETED)
                    if not done:
                        yield None
                    for future in done:
                        request = asked.pop(future)
                        if not self._stopped.is_set():
                            for following in islice(self._requests, 1):
                                asked[pool.submit(self._answer, following)] = following
                        with suppress(_StoppedError):
                            yield request, future.result()
            finally:
                self.stop()
                pool.shutdown(cancel_futures=True)

    def _answer(self, request: BatchRequest) -> dict[str, Any]:
        self._check()
        return self._answers.answer(request)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError
