"""Where the requests of a batch are answered: by an engine here, or on a cluster (`on_ray`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from ..cache.statistics import mib_text
from ..engine import Engine
from ..sessions.identity import model_identity, settings_identity
from .answering import Answers, Manner
from .reading import BatchInput, BatchRequest

# Seconds after which whoever waits for a result is asked whether to go on.
TICK = 0.1

Result = tuple[BatchRequest, dict[str, Any]]


class Workplace(Protocol):
    """Answers the requests that it was made for."""

    @property
    def model(self) -> dict[str, Any]:
        """The fields of the model file's `ModelIdentity`."""

    @property
    def settings(self) -> dict[str, Any]:
        """Those of each cache, as `settings_identity` has them."""

    @property
    def caches(self) -> str:
        """How many caches there are, and the memory of one."""

    @property
    def tokens(self) -> int:
        """Tokens that were evaluated so far, as far as is known."""

    def stop(self) -> None:
        """Break off the answers in the making; `results` ends when that has happened."""

    def results(self) -> Generator[Result | None, None, None]:
        """Answer the requests.

        Yields:
            Each request with its answer as it ends, and None where nothing has ended for a while.

        Raises:
            PyH2OError: what is no fault of a request.
        """


class Here:
    """A `Workplace` in this process."""

    def __init__(
        self, engine: Engine, batch: BatchInput, requests: Sequence[BatchRequest], manner: Manner
    ) -> None:
        """Get ready.

        Args:
            engine: answers as many requests at once as it has places.
            batch: whose requests they are.
            requests: that are to be answered.
            manner: for what the requests leave open.

        Raises:
            SessionError: the model file is gone.
        """
        self.model = vars(model_identity(engine.model))
        self.settings = settings_identity(engine.model)
        self._engine = engine
        self._run = BatchRun(requests, engine.n_places)
        self._answers = Answers(engine, batch, manner, self._run.check)

    @property
    def caches(self) -> str:
        return f"{self._engine.n_places} x {mib_text(self._engine.report()[0].kv.bytes_total)} MiB"

    @property
    def tokens(self) -> int:
        return self._engine.batches.tokens

    def stop(self) -> None:
        self._run.stop()

    def results(self) -> Generator[Result | None, None, None]:
        return self._run.results(self._answers.answer)


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
        self._n_at_once = n_at_once
        self._stopped = threading.Event()

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

        def begin(request: BatchRequest) -> dict[str, Any]:
            self.check()
            return answer(request)

        with ThreadPoolExecutor(self._n_at_once, "pyh2o request") as pool:
            # as many again are at hand, so that no thread waits for who takes the results
            first = islice(self._requests, 2 * self._n_at_once)
            asked = {pool.submit(begin, request): request for request in first}
            try:
                while asked:
                    done, _ = wait(asked, TICK, FIRST_COMPLETED)
                    if not done:
                        yield None
                    for future in done:
                        request = asked.pop(future)
                        if not self._stopped.is_set():
                            for following in islice(self._requests, 1):
                                asked[pool.submit(begin, following)] = following
                        with suppress(_StoppedError):
                            yield request, future.result()
            finally:
                self.stop()
                pool.shutdown(cancel_futures=True)
