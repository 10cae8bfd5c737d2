"""A comparison from its settings to its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from ...cache.settings import EvictionSettings
from ...cache.statistics import mib_text
from ...errors import SettingsError
from ...system.machine import machine_facts
from ...system.memory import available_bytes
from ..caches import MeasuredCache
from ..measurement import Progress
from ..model import ModelFacts
from . import bandwidth
from .caches import ELEMENT_BYTES, BenchSettings
from .figures import Basis, HistoryResult, Report, full_bytes, history_result
from .messages import Ready, Start
from .process import CacheFailedError, WorkerProcess
from .turns import StoppedEarly, Turns

# Bytes of a weight that transformers has unpacked.
UNPACKED_BYTES = 4

# OpenVINO copies the weights, converts them, and packs them for its kernels: about so many times
# the file, on three types of weights.
OPENVINO_COPIES = 3

# Seconds between two turns: OpenMP's threads spin for some milliseconds before they go to sleep.
PAUSE = 0.01

# A token that is generated takes about as long as so many that are read: for the progress only.
READ_PER_GENERATED = 4


class Comparison:
    """The processes of all caches, until it is closed.

    Attributes:
        report: what has been measured so far.
    """

    def __init__(
        self,
        settings: BenchSettings,
        model: ModelFacts,
        caches: list[MeasuredCache],
        tokens: tuple[int, ...],
        progress: Progress,
    ) -> None:
        """Nothing is started yet.

        Args:
            settings: what is asked for.
            model: facts about it.
            caches: from `caches_to_compare`.
            tokens: settings.text_tokens of them.
            progress: told what goes on.
        """
        self._settings = settings
        self._model = model
        self._caches = caches
        self._tokens = tokens
        self._progress = progress
        self._workers: dict[str, WorkerProcess] = {}
        self._failures: dict[str, str] = {}
        self.report = Report(
            machine=_machine(settings, model),
            settings=_settings(settings, model),
            basis=Basis(0.0, model.weight_bytes, None),
            caches=tuple(caches),
            notes=_notes(settings, model),
        )

    def start(self) -> None:
        """Measure the memory bandwidth and make all caches.

        What they will take is told as soon as the first one shows it.

        Raises:
            SettingsError: there is too little memory, or no cache could be made.
        """
        speed = None
        if self._settings.compute.gpu_layers == 0:
            speed = bandwidth.bytes_per_second(self._settings.compute.threads)
        # The smallest of llama.cpp tells how much the others will take before they take it.
        waiting = sorted(self._caches, key=lambda cache: (_is_other(cache), cache.cells))
        first = waiting.pop(0)
        while not self._open(first):
            if not waiting or _is_other(waiting[0]):
                raise SettingsError(f"no cache could be made; {self._first_failure()}")
            first = waiting.pop(0)
        if not self._workers[first.name].ready.use.bytes_rows:
            raise SettingsError(
                "no layer of this model has keys and values of the whole text: give another --model"
            )
        self._check_memory(first, waiting)
        for cache in waiting:
            made = len(self._workers) + len(self._failures)
            self._progress.extra("making the caches", made, len(self._caches))
            self._open(cache)
        use = self._workers[first.name].ready.use
        full = full_bytes(use, first.kv_type, self._settings.full_tokens)
        self.report = replace(
            self.report,
            basis=Basis(full, self._model.weight_bytes, speed),
            notes=(*self.report.notes, *_notes_of_memory(self._workers.values())),
            failures=tuple(self._failures.items()),
        )

    def measure(self) -> Iterator[HistoryResult]:
        """Measure one history after the other; `report` has each before it is returned.

        Raises:
            SettingsError: no cache is left.
            KeyboardInterrupt: Ctrl-C; `report` has what is measured, and the rounds of the history
                that was under way.
        """
        settings = self._settings
        # What caches that have evicted need not read again is not known ahead.
        self._progress.plan(sum(map(self._work, self._caches)))
        turns = Turns(
            [
                (cache, self._workers[cache.name])
                for cache in self._caches
                if cache.name in self._workers
            ],
            longest=settings.histories[-1],
            rounds=settings.rounds,
            n=settings.n,
            pause=PAUSE,
            on_turn=self._on_turn,
        )
        for history in settings.histories:
            stopped = None
            try:
                runs = turns.measure(history)
            except StoppedEarly as early:
                runs, stopped = early.runs, early
            finally:
                self._failures.update(turns.failures)
                self.report = replace(self.report, failures=tuple(self._failures.items()))
            if not runs:
                raise SettingsError(f"no cache is left to measure; {self._first_failure()}")
            result = history_result(history, runs, self.report.basis)
            done = stopped is None and history == settings.histories[-1]
            self.report = replace(
                self.report, histories=(*self.report.histories, result), complete=done
            )
            if stopped is not None:
                raise stopped
            yield result

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.close()

    def _work(self, cache: MeasuredCache) -> int:
        histories = self._settings.histories
        taken = [one for one in histories if cache.takes_part(one, histories[-1])]
        generated = self._settings.generated * READ_PER_GENERATED * len(taken)
        return max((cache.target(one) for one in taken), default=0) + generated

    def _on_turn(self, cache: MeasuredCache, action: str, tokens: int) -> None:
        weight = READ_PER_GENERATED if action == "generates" else 1
        self._progress.advance(cache.name, tokens * weight)

    def _open(self, cache: MeasuredCache) -> bool:
        """Start the process of a cache; False if that failed."""
        settings = self._settings
        start = Start(
            cache=cache,
            model=self._model.path,
            window=settings.window,
            compute=settings.compute,
            tokens=self._tokens,
        )
        try:
            worker = WorkerProcess(start)
        except CacheFailedError as error:
            self._failures[error.name] = error.reason
            return False
        self._workers[cache.name] = worker
        return True

    def _first_failure(self) -> str:
        return next((f"{name}: {reason}" for name, reason in self._failures.items()), "")

    def _check_memory(self, first: MeasuredCache, rest: list[MeasuredCache]) -> None:
        ready = self._workers[first.name].ready
        overhead = max(0, ready.own_bytes - ready.use.bytes_total)
        kv_rest = sum(_kv_bytes(cache, first, ready) for cache in rest)
        still = (
            kv_rest
            + overhead * len(rest)
            + sum(_archive_bytes(cache, ready, first, self._settings) for cache in self._caches)
            + sum(_weight_bytes(cache, self._model) for cache in rest)
            # All processes of llama.cpp map the same pages of the file.
            + self._model.file_bytes
        )
        available = available_bytes()
        note = (
            f"the caches take {mib_text(ready.use.bytes_total + kv_rest)} MiB, and "
            f"{(ready.own_bytes + still) / 2**30:.2f} GiB with all that goes with them; "
            f"{available / 2**30:.2f} GiB are available"
        )
        self._progress.note(note)
        if still > available:
            raise SettingsError(
                f"the caches need about {still / 2**30:.1f} GiB more and {available / 2**30:.1f} "
                "GiB are available: lower --ctx or --history, or give fewer --budget and --kv-type"
            )


_TORCH = ("transformers", "kvpress")


def _is_other(cache: MeasuredCache) -> bool:
    """Whether another program than llama.cpp runs it."""
    return cache.kind not in ("full", "evicting")


def _weight_bytes(cache: MeasuredCache, model: ModelFacts) -> int:
    """What the weights will take that a cache's process has for itself."""
    if cache.kind in _TORCH:
        return UNPACKED_BYTES * model.n_params
    return OPENVINO_COPIES * model.file_bytes if cache.kind == "openvino" else 0


def _kv_bytes(cache: MeasuredCache, first: MeasuredCache, ready: Ready) -> int:
    """What a cache will take, told from the first one."""
    rows = full_bytes(ready.use, first.kv_type, cache.cells)
    if cache.kind in _TORCH:
        return round(rows * UNPACKED_BYTES / ELEMENT_BYTES["f16"])
    scores = 0.0
    if cache.kind == "evicting" and ready.use.cells:
        scores = ready.use.bytes_scores / ready.use.cells * cache.cells
    return round(rows * ELEMENT_BYTES[cache.kv_type] / ELEMENT_BYTES["f16"] + scores)


def _archive_bytes(
    cache: MeasuredCache, ready: Ready, first: MeasuredCache, settings: BenchSettings
) -> int:
    """What the archive of a cache that has one will take: all that it reads."""
    if not cache.recall:
        return 0
    rows = full_bytes(ready.use, first.kv_type, settings.text_tokens)
    return round(rows * ELEMENT_BYTES[EvictionSettings.recall_type] / ELEMENT_BYTES["f16"])


def _machine(settings: BenchSettings, model: ModelFacts) -> dict[str, Any]:
    return {
        **machine_facts(settings.compute.threads, settings.compute.gpu_layers),
        "model": model.path.name,
        "model_file_bytes": model.file_bytes,
        "n_ctx_train": model.n_ctx_train,
    }


def _settings(settings: BenchSettings, model: ModelFacts) -> dict[str, Any]:
    # Where the file lies is nobody else's business.
    record = {**asdict(settings), "model": model.path.name}
    return {**record, **record.pop("compute")}


def _notes_of_memory(workers: Iterable[WorkerProcess]) -> tuple[str, ...]:
    beside = sorted({worker.ready.use.bytes_fixed for worker in workers} - {0})
    if not beside:
        return ()
    sizes = " to ".join(mib_text(n_bytes) for n_bytes in dict.fromkeys((beside[0], beside[-1])))
    return (
        f"KV memory is that of the layers that see the whole text; windows and recurrent states "
        f"take {sizes} MiB beside it",
    )


def _notes(settings: BenchSettings, model: ModelFacts) -> tuple[str, ...]:
    if settings.histories[-1] <= model.n_ctx_train:
        return ()
    return (
        f"histories of more than {model.n_ctx_train} tokens are beyond what the model was trained "
        "on: a full cache then shows its speed, but could not write sense",
    )
