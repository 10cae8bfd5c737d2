"""The models of a server: loaded on demand, closed when another model needs the memory.

* A request holds a lease on its model, even while it waits. A leased model is never closed.
* A model is loaded once for all requests that wait for it, and they share the error if it fails.
* `keep_alive` of a request says how long its model stays loaded when idle. The last value counts
  until the model is closed. Without one, a model stays until another model needs the memory.
* One model is loaded at a time, because free memory is measured before the load and llama_cpp
  redirects the output of the process during it. Requests for loaded models are not blocked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ..errors import BusyError, SettingsError
from ..limits import LOOK_SECONDS, Limits
from ..sessions.identity import ModelIdentity
from ..system.memory import spare_bytes
from .embeddings import EmbeddingModel
from .refusals import INTERNAL, RefusedError, ShutdownError, shortened, without_folders
from .served_model import ServedModel

AnyModel = ServedModel | EmbeddingModel
OnLoad = Callable[[float], None]

logger = logging.getLogger("uvicorn.error")


@dataclass(eq=False)
class ModelSource:
    """A model that can be loaded.

    Attributes:
        load: loads the model. It calls its argument with the progress, 0 to 1; an error from that
            call aborts the load.
        identity: identity in saved sessions; None without sessions.
        typed: the name or path from the command line, which requests may use too.
        made: the model or the error of loading it; None if it is not loaded.
        n_leases: requests that use the model or wait for it.
        idle_since: when the last lease ended, on the monotonic clock.
        keep_alive: idle seconds after which the model is closed; None or negative for never.
    """

    name: str
    load: Callable[[OnLoad], AnyModel]
    n_at_once: int = 1
    embeds: bool = False
    needed_bytes: int = 0
    identity: ModelIdentity | None = None
    typed: str = ""
    # Protected by the lock of `ServedModels`.
    made: Future[AnyModel] | None = field(default=None, init=False)
    n_leases: int = field(default=0, init=False)
    idle_since: float = field(default=0.0, init=False)
    keep_alive: float | None = field(default=None, init=False)
    timer: threading.Timer | None = field(default=None, init=False)

    @property
    def model(self) -> AnyModel | None:
        """The model if it is loaded; without a lease it may be closed at any time."""
        made = self.made
        return made.result() if made is not None and made.done() and not made.exception() else None


class ServedModels:
    """The models that requests choose from by name; the first is the default."""

    def __init__(self, sources: Sequence[ModelSource], limits: Limits) -> None:
        self.sources = tuple(sources)
        self.limits = limits
        name, n = Counter(source.name for source in self.sources).most_common(1)[0]
        if n > 1:
            raise SettingsError(
                f"two models have the name {name}: rename one of the files, whose names requests "
                "use to choose a model"
            )
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._shutting_down = False

    # ---------------------------------------------------------------------------------------------
    # Lookup
    # ---------------------------------------------------------------------------------------------

    def named(self, name: str) -> ModelSource:
        """Return the model with this name, ignoring case, ".gguf" and ":latest"."""
        for source in self.sources:
            if source.name == name:
                return source
        for source in self.sources:
            if _plain(name) in (_plain(source.name), _plain(source.typed or source.name)):
                return source
        raise RefusedError(
            404,
            f"unknown model {shortened(name)}: use {_either(self.sources)}",
            param="model",
            code="model_not_found",
        )

    def find(self, name: str | None, *, embeds: bool | None = None) -> ModelSource:
        """Return the model for a request; a server with one model accepts any name."""
        fitting = [each for each in self.sources if embeds in (None, each.embeds)]
        if len(self.sources) == 1 or not name:
            found = (fitting or self.sources)[0]
        else:
            found = self.named(name)
        if found in fitting:
            return found
        what = "is not an embedding model" if embeds else "is an embedding model"
        hint = f"use {_either(fitting)}" if fitting else "serve another one too (--model FILE)"
        raise RefusedError(400, f"the model {found.name} {what}: {hint}", param="model")

    def loaded(self) -> list[AnyModel]:
        """Return the loaded models; without a lease each may be closed at any time."""
        return [model for source in self.sources if (model := source.model) is not None]

    # ---------------------------------------------------------------------------------------------
    # Leases, for the threads of requests
    # ---------------------------------------------------------------------------------------------

    @contextmanager
    def lease(
        self, source: ModelSource, check: Callable[[], None], keep_alive: float | None = None
    ) -> Iterator[AnyModel]:
        """Load the model if necessary, and keep it open until the context ends.

        Args:
            check: called repeatedly while the model is being loaded; its errors end the wait.
            keep_alive: idle seconds after which the model is closed; negative for never, None to
                keep the value of earlier requests.

        Raises:
            RefusedError: the model cannot be loaded, too many requests wait, or no slot was free
                in time.
            BaseException: from `check`.
        """
        with self._lock:
            if source.n_leases >= source.n_at_once + self.limits.waiting:
                n = self.limits.waiting
                raise RefusedError(503, f"{n} requests are waiting already: try again later")
            source.n_leases += 1
            source.keep_alive = source.keep_alive if keep_alive is None else keep_alive
        try:
            yield self._model_of(source, check)
        except BusyError:
            raise RefusedError(
                503,
                f"no slot was free for {self.limits.wait_seconds:g} seconds: try again later, or "
                "start the server with a higher --max-wait",
            ) from None
        finally:
            with self._lock:
                source.n_leases -= 1
                source.idle_since = time.monotonic()
            self._close_idle(source)

    def unload(self, source: ModelSource) -> None:
        with self._lock:
            source.keep_alive = 0
        self._close_idle(source)

    def _close_idle(self, source: ModelSource) -> None:
        """Close the model if it was idle for `keep_alive` seconds; otherwise start a timer."""
        with self._lock:
            if source.timer is not None:
                source.timer.cancel()
            if source.n_leases:
                return
            model, keep_alive = source.model, source.keep_alive
            if model is None or keep_alive is None or keep_alive < 0:
                source.keep_alive = keep_alive if model else None
                return
            left = source.idle_since + keep_alive - time.monotonic()
            if left > 0:
                left = min(left, threading.TIMEOUT_MAX)
                source.timer = threading.Timer(left, self._close_idle, [source])
                source.timer.daemon = True
                source.timer.start()
                return
            source.made = source.keep_alive = None
        model.close()
        logger.info(f"closed the idle model {model.name} (keep_alive)")

    def _model_of(self, source: ModelSource, check: Callable[[], None]) -> AnyModel:
        with self._lock:
            if is_first := source.made is None:
                source.made = Future()
            made = source.made
        if is_first:
            self._load(source, made)
        while not made.done():
            wait([made], LOOK_SECONDS)
            check()
        return made.result()

    def _load(self, source: ModelSource, made: Future[AnyModel]) -> None:
        """Load the model for all waiting requests, even if the first one was cancelled."""
        try:
            with self._loading:
                self._check_open()
                self._free_memory(source)
                model = source.load(self._check_open)
        except BaseException as error:
            with self._lock:
                source.made = None  # the next request tries again
            made.set_exception(_load_refusal(source, error))
        else:
            made.set_result(model)
            model.shutting_down = self._shutting_down
            logger.info(f"loaded the model {model.name}")

    def _check_open(self, _fraction: float = 0.0) -> None:
        if self._shutting_down:
            raise ShutdownError("the server is shutting down")

    def _free_memory(self, source: ModelSource) -> None:
        """Close idle models until there is enough memory, or none if that is impossible."""
        while (spare := spare_bytes()) < source.needed_bytes:
            idle = self._take_idle(source.needed_bytes - spare)
            if idle is None:
                needed, left = (f"{n / 2**20:,.0f} MiB" for n in (source.needed_bytes, spare))
                raise RefusedError(
                    503,
                    f"not enough memory for the model {source.name}: it needs about {needed}, "
                    f"{left} are free, and closing idle models is not enough: try again later, or "
                    "serve fewer models",
                )
            idle.close()
            logger.info(f"closed the model {idle.name} to make room for {source.name}")

    def _take_idle(self, needed_bytes: int) -> AnyModel | None:
        """Unregister and return the model that has been idle longest.

        Return None if closing all idle models would free fewer than `needed_bytes`.
        """
        with self._lock:
            idle = {
                source: model
                for source in self.sources
                if source.n_leases == 0 and (model := source.model) is not None
            }
            freed = sum(source.needed_bytes + idle[source].grown_bytes() for source in idle)
            if freed < needed_bytes:
                return None
            oldest = min(idle, key=lambda source: source.idle_since)
            oldest.made = oldest.keep_alive = None
            return idle[oldest]

    # ---------------------------------------------------------------------------------------------
    # Startup and shutdown
    # ---------------------------------------------------------------------------------------------

    def start(self, on_load: OnLoad) -> AnyModel:
        model = self.sources[0].load(on_load)
        made: Future[AnyModel] = Future()
        made.set_result(model)
        self.sources[0].made = made
        return model

    def shut_down(self) -> None:
        """Cancel all requests and the current load; safe at any time, also in a signal handler."""
        self._shutting_down = True
        for model in self.loaded():
            model.shutting_down = True

    def close(self) -> None:
        """Free all models; none can be loaded afterwards."""
        self.shut_down()
        for source in self.sources:
            if source.timer is not None:
                source.timer.cancel()
                source.timer.join()
            made, source.made = source.made, None
            if made is not None:
                with suppress(Exception):  # already reported to the requests that waited
                    made.result().close()


def _load_refusal(source: ModelSource, error: BaseException) -> BaseException:
    if isinstance(error, (RefusedError, ShutdownError)) or not isinstance(error, Exception):
        return error
    reason = without_folders(str(error) or type(error).__name__)
    refusal = RefusedError(INTERNAL, f"the model {source.name} could not be loaded: {reason}")
    refusal.__cause__ = error
    return refusal


def _plain(name: str) -> str:
    """Return a name in lower case without suffixes that clients add."""
    return name.casefold().removesuffix(":latest").removesuffix(".gguf")


def _either(sources: Sequence[ModelSource]) -> str:
    return " or ".join(source.name for source in sources)
