"""Loading the model that the options ask for.

What loads llama.cpp is imported in functions: `--help` must not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyh2o.errors import ModelError
from pyh2o.models import find_model

from .errors import EXIT_ERROR, InputError
from .options import ModelOptions
from .terminal.interrupts import Interrupts
from .terminal.progress import Bars
from .terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.compat.llama import Llama
    from pyh2o.core.model import Model
    from pyh2o.engine import Engine


class Reader(Protocol):
    """Who is told how a prompt is read, and may stop that."""

    def on_read(self, done: int, total: int) -> None:
        """To be called after each piece of it: `done` of `total` tokens."""

    def check(self) -> None:
        """To be called while a piece is read; what it raises breaks that off."""


def load_llama(options: ModelOptions, bars: Bars, reader: Reader) -> Llama:
    """Load the model; `reader` is told of each prompt that it reads.

    Raises:
        PyH2OError: no such model, a broken or refused one, or settings that make no sense.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    from pyh2o.compat.llama import Llama

    path = find_model(options.model)
    machine = with_gpu_layers(machine_settings(options), options, path, texts=1)
    with watched_load(bars) as on_load:
        llm = Llama(
            str(path),
            load_progress=on_load,
            prompt_progress=reader.on_read,
            on_exact_prefill=say_prefill,
            **machine,
            **cache_settings(options),
        )
    llm.text.while_reading = reader.check
    say_layers(llm.text.model, options)
    return llm


def load_engine(options: ModelOptions, bars: Bars, *, texts: int, store_mib: int) -> Engine:
    """Load the model with places for so many texts, and a store for others.

    Raises:
        PyH2OError: as `load_llama`; also settings that only one text can have.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    path, machine = find_model(options.model), machine_settings(options)
    with watched_load(bars) as on_load:
        return open_engine(path, options, machine, on_load, texts=texts, store_mib=store_mib)


def open_engine(
    path: Path,
    options: ModelOptions,
    machine: dict[str, Any],
    on_load: Callable[[float], None],
    *,
    texts: int,
    store_mib: int,
) -> Engine:
    """An engine for a model's file, with what `machine_settings` returned."""
    from pyh2o.engine import Engine

    settings = {**with_gpu_layers(machine, options, path, texts=texts), **cache_settings(options)}
    engine = Engine(str(path), texts=texts, store_mib=store_mib, load_progress=on_load, **settings)
    say_layers(engine.model, options)
    return engine


def check_model_stays(options: ModelOptions, outputs: Iterable[Path]) -> None:
    """Refuse to put what a model writes into the place of the model.

    Raises:
        InputError: one of the files that would be replaced is the model's.
    """
    try:
        model = find_model(options.model)
    except ModelError:
        return  # which is said when it is loaded
    for output in outputs:
        if output.is_file() and model.is_file() and output.samefile(model):
            raise InputError(f"{output} is the model: give another --output")


def say_layers(model: Model, options: ModelOptions) -> None:
    """Say on which machines the layers are, if there are several."""
    if options.rpc and not options.verbose:  # which says so by itself
        from pyh2o.library.rpc import layers_text

        terminal.say(layers_text(model.weights.layers_at()), style="dim")


@contextmanager
def watched_load(bars: Bars) -> Iterator[Callable[[float], None]]:
    """While a model is loaded: what is to be called with 0 .. 1 shows it, and takes Ctrl-C.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    with Interrupts() as interrupts:

        def on_load(fraction: float) -> None:
            bars.loading(fraction)
            interrupts.check()

        try:
            yield on_load
        finally:
            bars.clear()
            interrupts.check()  # a load that was broken off fails like that of a damaged file


def machine_settings(options: ModelOptions) -> dict[str, Any]:
    """What `Llama` takes of where and how a model is computed.

    Raises:
        SettingsError: a server's address that is none.
    """
    servers = servers_of(options.rpc)
    n_gpu_layers = usable_gpu_layers(options.gpu_layers, servers)
    return {"n_gpu_layers": n_gpu_layers, "rpc_servers": servers, **thread_settings(options)}


def thread_settings(options: ModelOptions) -> dict[str, Any]:
    """What `Llama` takes of how this machine or another one computes."""
    return {
        "verbose": options.verbose,
        "n_threads": options.threads,
        "n_threads_batch": options.threads_batch or options.threads,
    }


def with_gpu_layers(
    machine: dict[str, Any], options: ModelOptions, path: Path, *, texts: int
) -> dict[str, Any]:
    """What `machine_settings` returned, with as many layers on the GPUs as fit with so many texts.

    Raises:
        PyH2OError: the model cannot be read, or settings make no sense for it.
    """
    if options.gpu_layers is not None or options.rpc:
        return machine
    from pyh2o.library.devices import find_gpus, fit_layers

    if not (gpus := find_gpus()):
        return machine
    fit = fit_layers(layer_bytes(options, path, texts=texts), gpus)
    terminal.say(str(fit), style="dim")
    return {**machine, "n_gpu_layers": fit.n_layers}


def layer_bytes(options: ModelOptions, path: Path, *, texts: int) -> list[int]:
    """What each layer of a model takes with these options, and the output."""
    from pyh2o.core.description import caches_of_layers, describe_model, weights_of_layers
    from pyh2o.models.header import read_header

    found = describe_model(
        path,
        options.eviction,
        n_ctx=options.ctx or read_header(path).trained_context,
        kv_type=options.kv_type.value,
    )
    *layers, output = weights_of_layers(path)
    cache = found.full if options.no_evict else found.evicting
    if cache is not None:
        caches = caches_of_layers(found.layers, cache, len(layers), n_texts=texts)
        layers = [weights + kept for weights, kept in zip(layers, caches, strict=True)]
    return [*layers, output]


def cache_settings(options: ModelOptions) -> dict[str, Any]:
    """What `Llama` takes of the cache."""
    from pyh2o.core.parameters import KV_TYPES

    kv_type = KV_TYPES[options.kv_type.value]
    return {
        **vars(options.eviction),
        "evict": not options.no_evict,
        "n_ctx": options.ctx,
        "type_k": kv_type,
        "type_v": kv_type,
    }


def servers_of(given: list[str] | None) -> tuple[str, ...]:
    """The servers of `--rpc`; if one is lost, the program ends with a line that says so.

    Raises:
        SettingsError: a text that is no host:port.
    """
    if not given:
        return ()
    from pyh2o.library import rpc

    def end(line: str) -> None:
        terminal.say(f"error: {line}", style="red")
        os._exit(EXIT_ERROR)  # llama.cpp would abort

    rpc.report_loss(end)
    return rpc.parse_servers(given)


def usable_gpu_layers(asked: int | None, servers: Sequence[str] = ()) -> int:
    """How many layers to offload: none, and a line that says why, if there is nowhere to."""
    from pyh2o.library.devices import why_no_gpu
    from pyh2o.library.rpc import ALL_LAYERS

    if asked is None:
        return ALL_LAYERS if servers else 0
    if asked and not servers and (missing := why_no_gpu()):
        terminal.say(missing)
        return 0
    return asked


def say_prefill(n_tokens: int, n_bytes: int) -> None:
    """Say what an exact prefill takes, before it is taken."""
    from pyh2o.cache.statistics import mib

    terminal.say(f"reading {n_tokens:,} tokens in full takes {mib(n_bytes):,} MiB until then")
