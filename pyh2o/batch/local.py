"""Answers the requests of a batch by an engine in this process; `on_ray` does so on a cluster."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from typing import Any

from ..cache.statistics import mib_text
from ..engine import Engine
from ..sessions.headers import model_identity, settings_identity
from .answering import Answers, RequestDefaults
from .reading import BatchRequest

# Seconds after which whoever waits for a result is asked whether to go on.
TICK = 0.1

Result = tuple[BatchRequest, dict[str, Any]]


class _StoppedError(BaseException):
    """An answer that is broken off."""


class LocalRunner:
    """Answers requests in this process.

    Attributes:
        model: the fields of the model file's `ModelIdentity`.
        settings: those of each cache, as `settings_identity` has them.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[BatchRequest], defaults: RequestDefaults
    ) -> None:
        """Get ready to answer these requests, as many at once as the engine has places.

        Raises:
            SessionError: the model file is gone.
        """
        self.model = vars(model_identity(engine.model))
        self.settings = settings_identity(engine.model)
        self._engine = engine
        self._requests = iter(requests)
        self._stopped = threading.Event()
        self._answers = Answers(engine, defaults, self._check)

    @property
    def caches(self) -> str:
        """How many caches there are, and the memory of one."""
        return f"{self._engine.n_slots} x {mib_text(self._engine.report()[0].kv.bytes_total)} MiB"

    def stop(self) -> None:
        """Break off the answers in the making; `results` ends when that has happened."""
        self._stopped.set()

    def results(self) -> Generator[Result | None, None, None]:
        """Answer the requests.

        Yields:
            Each request with its answer as it ends, and None where nothing has ended for a while.

        Raises:
            Exception: what is no fault of a request; the other answers are broken off.
        """
        n_at_once = self._engine.n_slots
        with ThreadPoolExecutor(n_at_once, "pyh2o request") as pool:
            # as many again are at hand, so that no thread waits for who takes the results
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
