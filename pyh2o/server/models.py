"""The models of a server, by name: loaded when asked for, closed where another one needs the room.

What holds:

* A request has a lease on its model, while it waits for it too. Such a model is not closed.
* A model is loaded once, however many requests wait for it, and they share what comes of that.
* A request may say how long its idle model stays loaded (`keep_alive`). The last value holds until
  the model is closed. Without one, the model stays until another model needs the memory.
* One model is loaded at a time: memory is counted before, and llama_cpp turns the output of the
  whole program off meanwhile. Nobody else waits for that: requests for loaded models go on.
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
from ..sessions.headers import ModelIdentity
from ..system.memory import spare_bytes
from .embeddings import EmbeddingModel
from .refusals import INTERNAL, RefusedError, ShutdownError, shortened, without_folders
from .served_model import ServedModel

AnyModel = ServedModel | EmbeddingModel
OnLoad = Callable[[float], None]

logger = logging.getLogger("uvicorn.error")


@dataclass(eq=False)
class ModelSource:
    """A model that can be loaded, and what is known of it.

    Attributes:
        name: what clients know it by.
        load: loads it. It calls the function that it gets with 0 .. 1 meanwhile, whose error ends
            the loading.
        n_at_once: requests that are answered at the same time.
        embeds: whether it turns texts into vectors; else it writes text.
        needed_bytes: memory that it takes, about.
        identity: what tells which sessions are its own; None if it has none.
        typed: the name or path given on the command line, which requests may use, too.
        made: becomes the model, or why there is none; None while nobody has asked for it.
        n_leases: requests that use it or wait for it.
        idle_since: when the last one of them ended.
        keep_alive: idle seconds after which it is closed; None or below 0 for never.
        timer: closes it then.
    """

    name: str
    load: Callable[[OnLoad], AnyModel]
    n_at_once: int = 1
    embeds: bool = False
    needed_bytes: int = 0
    identity: ModelIdentity | None = None
    typed: str = ""
    # These change under the lock of `ServedModels`.
    made: Future[AnyModel] | None = field(default=None, init=False)
    n_leases: int = field(default=0, init=False)
    idle_since: float = field(default=0.0, init=False)
    keep_alive: float | None = field(default=None, init=False)
    timer: threading.Timer | None = field(default=None, init=False)

    @property
    def model(self) -> AnyModel | None:
        """The model, if it is loaded; it may be closed at any time."""
        made = self.made
        return made.result() if made is not None and made.done() and not made.exception() else None


class ServedModels:
    """Models that requests choose from by name.

    Args:
        sources: at least one; the first is for requests that name none.
        limits: what a request may take.

    Raises:
        SettingsError: two of them have the same name.
    """

    def __init__(self, sources: Sequence[ModelSource], limits: Limits) -> None:
        self.sources = tuple(sources)
        self.limits = limits
        name, n = Counter(source.name for source in self.sources).most_common(1)[0]
        if n > 1:
            raise SettingsError(
                f"two models are called {name}: requests choose one by its file's name, so give "
                "each file a name of its own"
            )
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._shutting_down = False

    # ---------------------------------------------------------------------------------------------
    # Which model
    # ---------------------------------------------------------------------------------------------

    def named(self, name: str) -> ModelSource:
        """The model of this name; case, ".gguf" and ":latest" do not matter.

        Raises:
            RefusedError: there is none.
        """
        for source in self.sources:
            if source.name == name:
                return source
        for source in self.sources:
            if _plain(name) in (_plain(source.name), _plain(source.typed or source.name)):
                return source
        raise RefusedError(
            404,
            f"there is no model {shortened(name)} here: take {_either(self.sources)}",
            param="model",
            code="model_not_found",
        )

    def find(self, name: str | None, *, embeds: bool | None = None) -> ModelSource:
        """The model for a request: where there is one only, it goes by any name.

        Args:
            name: that the request asks for; without one it gets the first model that can do it.
            embeds: whether embeddings are asked for; None where any model will do.

        Raises:
            RefusedError: there is none of this name, or it cannot do that.
        """
        fitting = [each for each in self.sources if embeds in (None, each.embeds)]
        if len(self.sources) == 1 or not name:
            found = (fitting or self.sources)[0]
        else:
            found = self.named(name)
        if found in fitting:
            return found
        what = "has no embeddings" if embeds else "has embeddings, and writes no text"
        cure = f"take {_either(fitting)}" if fitting else "serve another one too (--model FILE)"
        raise RefusedError(400, f"the model {found.name} {what}: {cure}", param="model")

    def loaded(self) -> list[AnyModel]:
        """The models that are loaded now; any of them may be closed at any time."""
        return [model for source in self.sources if (model := source.model) is not None]

    # ---------------------------------------------------------------------------------------------
    # For requests, in their threads
    # ---------------------------------------------------------------------------------------------

    @contextmanager
    def lease(
        self, source: ModelSource, check: Callable[[], None], keep_alive: float | None = None
    ) -> Iterator[AnyModel]:
        """The model, loaded, and not closed before the end.

        Args:
            source: of the model.
            check: called now and then while the model is loaded; what it raises ends the wait.
            keep_alive: idle seconds after which the model is closed; below 0 for never, None to
                keep the value of earlier requests.

        Raises:
            RefusedError: the model cannot be loaded, too many requests wait for it already, or
                there was no place in time.
            BaseException: what `check` raises.
        """
        with self._lock:
            if source.n_leases >= source.n_at_once + self.limits.waiting:
                n = self.limits.waiting
                raise RefusedError(503, f"{n} requests wait already: try again later")
            source.n_leases += 1
            source.keep_alive = source.keep_alive if keep_alive is None else keep_alive
        try:
            yield self._model_of(source, check)
        except BusyError:
            raise RefusedError(
                503,
                f"the model was busy for {self.limits.wait_seconds:g} seconds: try again later, "
                "or start the server with a higher --max-wait",
            ) from None
        finally:
            with self._lock:
                source.n_leases -= 1
                source.idle_since = time.monotonic()
            self._close_idle(source)

    def unload(self, source: ModelSource) -> None:
        """Close a model as soon as no request uses it."""
        with self._lock:
            source.keep_alive = 0
        self._close_idle(source)

    def _close_idle(self, source: ModelSource) -> None:
        """Close a model that has been idle for its `keep_alive`, or start the timer for that."""
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
        """Load a model for all who wait for it; whoever came first may have left."""
        try:
            with self._loading:
                self._check_open()
                self._make_room(source)
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

    def _make_room(self, source: ModelSource) -> None:
        """Close models that nobody uses until there is room for another one.

        Raises:
            RefusedError: those that are in use leave too little; then none is closed.
        """
        while (spare := spare_bytes()) < source.needed_bytes:
            idle = self._take_idle(source.needed_bytes - spare)
            if idle is None:
                needed, left = (f"{n / 2**20:,.0f} MiB" for n in (source.needed_bytes, spare))
                raise RefusedError(
                    503,
                    f"the model {source.name} takes about {needed} of memory, and {left} are left, "
                    "with too little in models that nobody uses: try again later, or serve fewer "
                    "models",
                )
            idle.close()
            logger.info(f"closed the model {idle.name} to make room for {source.name}")

    def _take_idle(self, needed_bytes: int) -> AnyModel | None:
        """The model that has been idle for longest, which is not among the loaded ones any more.

        None, if all that are idle take less than these bytes.
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
    # Beginning and end
    # ---------------------------------------------------------------------------------------------

    def start(self, on_load: OnLoad) -> AnyModel:
        """Load the first model.

        Raises:
            PyH2OError: it cannot be loaded.
            BaseException: what `on_load` raises.
        """
        model = self.sources[0].load(on_load)
        made: Future[AnyModel] = Future()
        made.set_result(model)
        self.sources[0].made = made
        return model

    def shut_down(self) -> None:
        """End all answers in the making, and the loading; it may be called at any moment."""
        self._shutting_down = True
        for model in self.loaded():
            model.shutting_down = True

    def close(self) -> None:
        """Free all models; none is loaded any more."""
        self.shut_down()
        for source in self.sources:
            if source.timer is not None:
                source.timer.cancel()
                source.timer.join()
            made, source.made = source.made, None
            if made is not None:
                with suppress(Exception):  # whoever waited for it was told
                    made.result().close()


def _load_refusal(source: ModelSource, error: BaseException) -> BaseException:
    """What those are told who waited for a model that could not be loaded."""
    if isinstance(error, (RefusedError, ShutdownError)) or not isinstance(error, Exception):
        return error
    reason = without_folders(str(error) or type(error).__name__)
    refusal = RefusedError(INTERNAL, f"the model {source.name} could not be loaded: {reason}")
    refusal.__cause__ = error
    return refusal


def _plain(name: str) -> str:
    """A model's name in lower case, without endings that clients add."""
    return name.casefold().removesuffix(":latest").removesuffix(".gguf")


def _either(sources: Sequence[ModelSource]) -> str:
    return " or ".join(source.name for source in sources)
