"""Loading the model that the options ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyh2o.models import find_model

from .interrupts import Interrupts
from .options import ModelOptions
from .progress import Bars

if TYPE_CHECKING:
    from pyh2o.llama import Llama

THREADS = ("n_threads", "n_threads_batch")


def load_llama(options: ModelOptions, bars: Bars, on_read: Callable[[int, int], None]) -> Llama:
    """Load the model; `on_read(done, total)` is called after each piece of a prompt is read.

    Raises:
        PyH2OError: no such model, a broken or refused one, or settings that make no sense.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    path = find_model(options.model)
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.llama import KV_TYPES, Llama

    kv_type = KV_TYPES[options.kv_type.value]
    threads = {} if options.threads is None else dict.fromkeys(THREADS, options.threads)
    with Interrupts() as interrupts:

        def on_load(fraction: float) -> None:
            bars.loading(fraction)
            interrupts.check()

        try:
            return Llama(
                str(path),
                hh=options.hh,
                recent=options.recent,
                pinned=options.pinned,
                slack=options.slack,
                positions=options.positions,
                evict=not options.no_evict,
                n_ctx=options.ctx,
                n_gpu_layers=options.gpu_layers,
                type_k=kv_type,
                type_v=kv_type,
                verbose=options.verbose,
                load_progress=on_load,
                prompt_progress=on_read,
                **threads,
            )
        finally:
            bars.clear()
            interrupts.check()  # a load that was broken off fails like that of a damaged file
