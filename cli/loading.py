"""Loading the model that the options ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pyh2o.models import find_model

from .options import ModelOptions
from .terminal.interrupts import Interrupts
from .terminal.progress import Bars
from .terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.engine import Engine
    from pyh2o.llama import Llama

Loaded = TypeVar("Loaded")


def load_llama(options: ModelOptions, bars: Bars, on_read: Callable[[int, int], None]) -> Llama:
    """Load the model; `on_read(done, total)` is called after each piece of a prompt is read.

    Raises:
        PyH2OError: no such model, a broken or refused one, or settings that make no sense.
        KeyboardInterrupt: Ctrl-C was pressed.
    """

    def make(path: str, **settings: Any) -> Llama:
        # Imported here because it loads llama.cpp.
        from pyh2o.llama import Llama

        return Llama(path, prompt_progress=on_read, on_exact_prefill=say_prefill, **settings)

    return _loaded(make, options, bars)


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

    return _loaded(make, options, bars)


def _loaded(make: Callable[..., Loaded], options: ModelOptions, bars: Bars) -> Loaded:
    """What `make` makes of the model's path and the settings that `Llama` takes."""
    path = find_model(options.model)
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.llama import KV_TYPES

    kv_type = KV_TYPES[options.kv_type.value]
    with Interrupts() as interrupts:

        def on_load(fraction: float) -> None:
            bars.loading(fraction)
            interrupts.check()

        try:
            return make(
                str(path),
                **vars(options.eviction),
                evict=not options.no_evict,
                n_ctx=options.ctx,
                n_gpu_layers=usable_gpu_layers(options.gpu_layers),
                type_k=kv_type,
                type_v=kv_type,
                verbose=options.verbose,
                load_progress=on_load,
                n_threads=options.threads,
                n_threads_batch=options.threads_batch or options.threads,
            )
        finally:
            bars.clear()
            interrupts.check()  # a load that was broken off fails like that of a damaged file


def usable_gpu_layers(asked: int) -> int:
    """How many layers to run on the GPU: none, and a line that says why, if there is no GPU."""
    # Imported here because it loads llama.cpp.
    from pyh2o.system.devices import why_no_gpu

    if asked and (missing := why_no_gpu()):
        terminal.say(missing)
        return 0
    return asked


def say_prefill(n_tokens: int, n_bytes: int) -> None:
    """Say what an exact prefill takes, before it is taken."""
    # Imported here because it loads llama.cpp.
    from pyh2o.cache.eviction import mib

    terminal.say(f"reading {n_tokens:,} tokens in full takes {mib(n_bytes):,} MiB until then")
