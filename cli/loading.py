"""Loading the model that the options ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pyh2o.errors import ModelError
from pyh2o.models import find_model

from .errors import EXIT_ERROR, InputError
from .options import ModelOptions
from .terminal.interrupts import Interrupts
from .terminal.progress import Bars
from .terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.engine import Engine
    from pyh2o.llama import Llama

Loaded = TypeVar("Loaded")


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

    def make(path: str, **settings: Any) -> Llama:
        # Imported here because it loads llama.cpp.
        from pyh2o.llama import Llama

        return Llama(path, prompt_progress=reader.on_read, on_exact_prefill=say_prefill, **settings)

    llm = _loaded(make, options, bars)
    llm.while_reading = reader.check
    say_layers(llm, options)
    return llm


def load_engine(options: ModelOptions, bars: Bars, *, texts: int, store_mib: int) -> Engine:
    """Load the model with places for so many texts, and a store for others.

    Raises:
        PyH2OError: as `load_llama`; also settings that only one text can have.
        KeyboardInterrupt: Ctrl-C was pressed.
    """

    def make(path: str, **settings: Any) -> Engine:
        # Imported here because it loads llama.cpp.
        from pyh2o.engine import Engine

        return Engine(path, texts=texts, store_mib=store_mib, **settings)

    engine = _loaded(make, options, bars, texts=texts)
    say_layers(engine.model, options)
    return engine


def check_model_stays(options: ModelOptions, outputs: Iterable[Path]) -> None:
    """Refuse to put what a model writes into the place of the model.

    Args:
        options: of the command.
        outputs: files that it would replace.

    Raises:
        InputError: one of them is the model's.
    """
    try:
        model = find_model(options.model)
    except ModelError:
        return  # which is said when it is loaded
    for output in outputs:
        if output.is_file() and model.is_file() and output.samefile(model):
            raise InputError(f"{output} is the model: give another --output")


def say_layers(llm: Llama, options: ModelOptions) -> None:
    """Say on which machines the layers are, if there are several."""
    if options.rpc and not options.verbose:  # which says so by itself
        # Imported here because it loads llama.cpp.
        from pyh2o.system.rpc import layers_text

        terminal.say(layers_text(llm.layers_at()), style="dim")


def _loaded(
    make: Callable[..., Loaded], options: ModelOptions, bars: Bars, *, texts: int = 1
) -> Loaded:
    """What `make` makes of the model's path and the settings that `Llama` takes."""
    path = find_model(options.model)
    machine = with_gpu_layers(machine_settings(options), options, path, texts=texts)
    settings = {**machine, **cache_settings(options)}
    with watched_load(bars) as on_load:
        return make(str(path), load_progress=on_load, **settings)


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
    return {
        "n_gpu_layers": usable_gpu_layers(options.gpu_layers, servers),
        "rpc_servers": servers,
        **thread_settings(options),
    }


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
    """The settings with as many layers on the GPUs as fit, unless the options say how many.

    Args:
        machine: what `machine_settings` returned.
        options: of the command.
        path: of the model.
        texts: that have a cache each.

    Raises:
        PyH2OError: the model cannot be read, or settings make no sense for it.
    """
    if options.gpu_layers is not None or options.rpc:
        return machine
    # Imported here because it loads llama.cpp.
    from pyh2o.system.devices import find_gpus, fit_layers

    if not (gpus := find_gpus()):
        return machine
    fit = fit_layers(layer_bytes(options, path, texts=texts), gpus)
    terminal.say(str(fit), style="dim")
    return {**machine, "n_gpu_layers": fit.n_layers}


def layer_bytes(options: ModelOptions, path: Path, *, texts: int) -> list[int]:
    """What each layer of a model takes with these options, and the output.

    Raises:
        PyH2OError: as above.
    """
    # Imported here because it loads llama.cpp.
    from pyh2o.llama.description import describe_model
    from pyh2o.llama.header import read_header
    from pyh2o.llama.layer_sizes import caches_of_layers, weights_of_layers

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
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.llama import KV_TYPES

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
    # Imported here because it loads llama.cpp.
    from pyh2o.system import rpc

    def end(line: str) -> None:
        terminal.say(f"error: {line}", style="red")
        os._exit(EXIT_ERROR)  # llama.cpp would abort

    rpc.report_loss(end)
    return rpc.parse_servers(given)


def usable_gpu_layers(asked: int | None, servers: Sequence[str] = ()) -> int:
    """How many layers to offload: none, and a line that says why, if there is nowhere to."""
    # Imported here because it loads llama.cpp.
    from pyh2o.system.devices import why_no_gpu
    from pyh2o.system.rpc import ALL_LAYERS

    if asked is None:
        return ALL_LAYERS if servers else 0
    if asked and not servers and (missing := why_no_gpu()):
        terminal.say(missing)
        return 0
    return asked


def say_prefill(n_tokens: int, n_bytes: int) -> None:
    """Say what an exact prefill takes, before it is taken."""
    # Imported here because it loads llama.cpp.
    from pyh2o.cache.eviction import mib

    terminal.say(f"reading {n_tokens:,} tokens in full takes {mib(n_bytes):,} MiB until then")
