"""Load models as the options say."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyh2o.errors import ModelError
from pyh2o.models import find_model

from .errors import EXIT_ERROR, InputError
from .options import ModelOptions
from .terminal.interrupts import Interrupts
from .terminal.progress import Bars
from .terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.compat.llama import Llama
    from pyh2o.engine import Engine


class ModelRun:
    """Shows the progress of loading and reading, and lets Ctrl-C stop reading and writing.

    Attributes:
        interrupts: to enter around code that Ctrl-C may stop only at safe places.
    """

    def __init__(self, bars: Bars) -> None:
        self.bars = bars
        self.interrupts = Interrupts()

    def on_read(self, done: int, total: int) -> None:
        """Show that `done` of `total` tokens of a prompt are read, and check for Ctrl-C."""
        self.bars.show("reading the prompt", done, total, "tokens")
        self.interrupts.check()

    def write_all(self, texts: Generator[str], write: Callable[[str], None]) -> bool:
        """Pass each text to `write`, until the first Ctrl-C; return whether it was pressed.

        `texts` are closed then. A second Ctrl-C raises.
        """
        try:
            with closing(texts):
                for text in texts:
                    write(text)
                    self.interrupts.check()
        except KeyboardInterrupt:
            if self.interrupts.presses != 1:
                raise
            return True
        finally:
            self.bars.clear()
        return False


def load_llama(options: ModelOptions, run: ModelRun, *, store_mib: int) -> Llama:
    """Load the model, which reports its progress to `run`; Ctrl-C stops it."""
    from pyh2o.compat.llama import Llama

    path = find_model(options.model)
    machine = with_gpu_layers(machine_settings(options), options, path, texts=1)
    with watched_load(run.bars) as on_load:
        llm = Llama(
            str(path),
            load_progress=on_load,
            prompt_progress=run.on_read,
            mmproj=options.mmproj and str(options.mmproj),
            store_mib=store_mib,
            **machine,
            **cache_settings(options),
        )
    llm.text.while_reading = run.interrupts.check
    return llm


def load_engine(options: ModelOptions, bars: Bars, *, texts: int, store_mib: int) -> Engine:
    """Load the model into an engine with `texts` slots and a limit of snapshots."""
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
    from pyh2o.engine import Engine

    settings = {**with_gpu_layers(machine, options, path, texts=texts), **cache_settings(options)}
    settings["mmproj"] = options.mmproj and str(options.mmproj)
    return Engine(str(path), texts=texts, store_mib=store_mib, load_progress=on_load, **settings)


def check_model_stays(options: ModelOptions, output: Path) -> None:
    """Raise an InputError if the output would replace the model."""
    with suppress(ModelError):  # reported when the model is loaded
        model = find_model(options.model)
        if output.is_file() and model.is_file() and output.samefile(model):
            raise InputError(f"{output} is the model: give another --output")


@contextmanager
def watched_load(bars: Bars) -> Iterator[Callable[[float], None]]:
    """Yield a progress callback for loading, which also handles Ctrl-C."""
    with Interrupts() as interrupts:

        def on_load(fraction: float) -> None:
            bars.show("loading the model", fraction, 1.0)
            interrupts.check()

        try:
            yield on_load
        finally:
            bars.clear()
            interrupts.check()  # an aborted load fails like that of a damaged file


def machine_settings(options: ModelOptions) -> dict[str, Any]:
    """Return arguments of `Llama` for devices and threads.

    If the connection to a server of `--rpc` is lost, the program prints an error and exits.
    """
    from pyh2o.library import rpc
    from pyh2o.library.devices import why_no_gpu

    def end(line: str) -> None:
        terminal.say(f"error: {line}", style="red")
        os._exit(EXIT_ERROR)  # llama.cpp would abort

    servers = rpc.parse_servers(options.rpc or [])
    if servers:
        rpc.report_loss(end)
    n_gpu_layers = options.gpu_layers
    if n_gpu_layers is None:
        n_gpu_layers = rpc.ALL_LAYERS if servers else 0
    elif n_gpu_layers and not servers and (missing := why_no_gpu()):
        terminal.say(missing)
        n_gpu_layers = 0
    return {"n_gpu_layers": n_gpu_layers, "rpc_servers": servers, **thread_settings(options)}


def thread_settings(options: ModelOptions) -> dict[str, Any]:
    """Return arguments of `Llama` that apply to any machine."""
    return {
        "verbose": options.verbose,
        "n_threads": options.threads,
        "n_threads_batch": options.threads_batch or options.threads,
    }


def with_gpu_layers(
    machine: dict[str, Any], options: ModelOptions, path: Path, *, texts: int
) -> dict[str, Any]:
    """Return the result of `machine_settings`, with as many layers on GPUs as fit."""
    if options.gpu_layers is not None or options.rpc:
        return machine
    from pyh2o.library import backends
    from pyh2o.library.devices import fit_layers

    if not (gpus := backends.discrete_gpus()):
        return machine
    n_layers, summary = fit_layers(layer_bytes(options, path, texts=texts), gpus)
    terminal.say(summary, style="dim")
    return {**machine, "n_gpu_layers": n_layers}


def layer_bytes(options: ModelOptions, path: Path, *, texts: int) -> list[int]:
    """Return the bytes of each layer with its caches, and of the output layer.

    Caches are divided evenly, as layers of each kind are spread over a model.
    """
    from pyh2o.core.description import describe_model, weights_of_layers
    from pyh2o.models.header import read_header

    found = describe_model(
        path,
        options.eviction,
        n_ctx=options.ctx or read_header(path).trained_context,
        kv_type=options.kv_type.value,
        n_gpu_layers=-1,
    )
    *layers, output = weights_of_layers(path)
    cache = found.full if options.no_evict else found.evicting
    each = cache.total * texts // len(layers) if cache is not None and layers else 0
    return [*(weights + each for weights in layers), output]


def cache_settings(options: ModelOptions) -> dict[str, Any]:
    """Return arguments of `Llama` for the cache."""
    from pyh2o.core.parameters import KV_TYPES

    kv_type = KV_TYPES[options.kv_type.value]
    return {
        **vars(options.eviction),
        "evict": not options.no_evict,
        "n_ctx": options.ctx,
        "type_k": kv_type,
        "type_v": kv_type,
    }
