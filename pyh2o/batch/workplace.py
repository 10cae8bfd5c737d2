"""Where the requests of a batch are answered: by an engine here, or on a cluster (`on_ray`)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

from ..cache.statistics import mib_text
from ..engine import Engine
from ..sessions.identity import model_identity, settings_identity
from .answering import Answers, Manner
from .reading import BatchInput, BatchRequest
from .running import BatchRun, Result


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
        return f"{self._engine.n_places} x {mib_text(self._engine.model.kv.bytes_total)} MiB"

    @property
    def tokens(self) -> int:
        return self._engine.batches.tokens

    def stop(self) -> None:
        self._run.stop()

    def results(self) -> Generator[Result | None, None, None]:
        return self._run.results(self._answers.answer)
