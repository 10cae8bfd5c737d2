"""A comparison from its settings to its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from ...errors import SettingsError
from ...system.machine import available_bytes, machine_facts
from . import bandwidth
from .caches import ELEMENT_BYTES, BenchSettings, Cache
from .messages import Ready, Start
from .model import BenchModel
from .process import CacheFailedError, WorkerProcess
from .results import Basis, HistoryResult, Report, full_bytes, history_result
from .turns import OnTurn, StoppedEarly, Turns

# Bytes of a weight that transformers has unpacked.
UNPACKED_BYTES = 4

# Seconds between two turns: OpenMP's threads spin for some milliseconds before they go to sleep.
PAUSE = 0.01

# Told while the caches are made: how many there are, and will be.
OnStart = Callable[[int, int], None]


class Comparison:
    """A context manager around the processes of all caches.

    Attributes:
        report: what has been measured so far.
        kv_bytes: what all caches take together.
        needed_bytes: the same with all else that the processes take.
    """

    def __init__(
        self,
        settings: BenchSettings,
        model: BenchModel,
        caches: list[Cache],
        tokens: tuple[int, ...],
    ) -> None:
        """Nothing is started yet.

        Args:
            settings: what is asked for.
            model: facts about it.
            caches: from `caches_to_compare`.
            tokens: settings.text_tokens of them.
        """
        self._settings = settings
        self._model = model
        self._caches = caches
        self._tokens = tokens
        self._workers: dict[str, WorkerProcess] = {}
        self._failures: dict[str, str] = {}
        self._processes = ExitStack()
        self.kv_bytes = 0
        self.needed_bytes = 0
        self.report = Report(
            machine=_machine(settings, model),
            settings=_settings(settings, model),
            basis=Basis(0.0, model.weight_bytes, None),
            caches=tuple(caches),
            notes=_notes(settings, model),
        )

    def start(self, on_start: OnStart, on_memory: Callable[[int, int, int | None], None]) -> None:
        """Measure the memory bandwidth and make all caches.

        Args:
            on_start: called after each cache.
            on_memory: called once the first cache shows what all will take, with the bytes of all
                caches, of all processes, and of memory available (None if the system does not
                tell).

        Raises:
            SettingsError: there is too little memory, or no cache could be made.
        """
        speed = None
        if self._settings.gpu_layers == 0:
            speed = bandwidth.bytes_per_second(self._settings.threads)
        # The smallest of llama.cpp tells how much the others will take before they take it.
        waiting = sorted(self._caches, key=lambda cache: (cache.kind in _TORCH, cache.cells))
        first = waiting.pop(0)
        while not self._open(first):
            if not waiting or waiting[0].kind in _TORCH:
                raise SettingsError(f"no cache could be made; {self._first_failure()}")
            first = waiting.pop(0)
        if not self._workers[first.name].ready.use.bytes_rows:
            raise SettingsError(
                "this model's cache is of another kind than rows of keys and values that all "
                "layers have for the whole text: give another --model"
            )
        self._check_memory(first, waiting, on_memory)
        for cache in waiting:
            on_start(len(self._workers) + len(self._failures), len(self._caches))
            self._open(cache)
        cells = max(self._settings.window, self._settings.text_tokens)
        full = full_bytes(self._workers[first.name].ready.use, first.kv_type, cells)
        self.report = replace(
            self.report,
            basis=Basis(full, self._model.weight_bytes, speed),
            failures=tuple(self._failures.items()),
        )

    def measure(self, on_turn: OnTurn) -> Iterator[HistoryResult]:
        """Measure one history after the other; `report` has each before it is returned.

        Raises:
            SettingsError: no cache is left.
            KeyboardInterrupt: Ctrl-C; `report` has what is measured, and the rounds of the history
                that was under way.
        """
        settings = self._settings
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
            on_turn=on_turn,
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

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._processes.close()

    def _open(self, cache: Cache) -> bool:
        """Start the process of a cache; False if that failed."""
        settings = self._settings
        start = Start(
            cache=cache,
            model=self._model.path,
            window=settings.window,
            threads=settings.threads,
            gpu_layers=settings.gpu_layers,
            tokens=self._tokens,
        )
        try:
            worker = self._processes.enter_context(WorkerProcess(start))
        except CacheFailedError as error:
            self._failures[error.name] = error.reason
            return False
        self._workers[cache.name] = worker
        return True

    def _first_failure(self) -> str:
        return next((f"{name}: {reason}" for name, reason in self._failures.items()), "")

    def _check_memory(
        self,
        first: Cache,
        rest: list[Cache],
        on_memory: Callable[[int, int, int | None], None],
    ) -> None:
        ready = self._workers[first.name].ready
        overhead = max(0, ready.own_bytes - ready.use.bytes_total)
        kv_rest = sum(_kv_bytes(cache, first, ready) for cache in rest)
        unpacked = sum(cache.kind in _TORCH for cache in rest)
        still = (
            kv_rest
            + overhead * len(rest)
            + UNPACKED_BYTES * self._model.n_params * unpacked
            # All processes of llama.cpp map the same pages of the file.
            + self._model.file_bytes
        )
        self.kv_bytes = ready.use.bytes_total + kv_rest
        self.needed_bytes = ready.own_bytes + still
        available = available_bytes()
        on_memory(self.kv_bytes, self.needed_bytes, available)
        if available is not None and still > available:
            raise SettingsError(
                f"the caches need about {still / 2**30:.1f} GiB more and {available / 2**30:.1f} "
                "GiB are available: lower --history or --ctx, or give fewer --budget and --kv-type"
            )


_TORCH = ("transformers", "kvpress")


def _kv_bytes(cache: Cache, first: Cache, ready: Ready) -> int:
    """What a cache will take, told from the first one."""
    rows = full_bytes(ready.use, first.kv_type, cache.cells)
    if cache.kind in _TORCH:
        return round(rows * UNPACKED_BYTES / ELEMENT_BYTES["f16"])
    scores = 0.0
    if cache.kind == "evicting" and ready.use.cells:
        scores = ready.use.bytes_scores / ready.use.cells * cache.cells
    return round(rows * ELEMENT_BYTES[cache.kv_type] / ELEMENT_BYTES["f16"] + scores)


def _machine(settings: BenchSettings, model: BenchModel) -> dict[str, Any]:
    return {
        **machine_facts(settings.threads, settings.gpu_layers),
        "model": model.path.name,
        "model_file_bytes": model.file_bytes,
        "n_ctx_train": model.n_ctx_train,
    }


def _settings(settings: BenchSettings, model: BenchModel) -> dict[str, Any]:
    # Where the file lies is nobody else's business.
    return {**asdict(settings), "model": model.path.name}


def _notes(settings: BenchSettings, model: BenchModel) -> tuple[str, ...]:
    beyond = [history for history in settings.histories if history > model.n_ctx_train]
    if not beyond:
        return ()
    return (
        f"histories of more than {model.n_ctx_train} tokens are beyond what the model was trained "
        "on: a full cache then shows its speed, but could not write sense",
    )
