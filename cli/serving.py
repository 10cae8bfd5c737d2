"""Run a server in the terminal, for `serve` and `chat --web`.

This module loads llama.cpp, so commands import it when they run.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyh2o import server
from pyh2o.core.description import describe_model
from pyh2o.core.embedding import Embedder, embedding_bytes
from pyh2o.core.parameters import Parameters
from pyh2o.errors import UnsupportedModelError
from pyh2o.limits import Limits
from pyh2o.models import find_model
from pyh2o.models.file_identity import identify
from pyh2o.models.header import ModelHeader, read_header
from pyh2o.models.names import readable_name
from pyh2o.server import EmbeddingModel, ModelSource, ServedModel
from pyh2o.server.models import AnyModel
from pyh2o.sessions.identity import ModelIdentity
from pyh2o.system.memory import share_freed_memory

from . import loading
from .errors import InputError
from .options import ModelOptions
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count


@dataclass(frozen=True)
class Serving:
    options: ModelOptions
    texts: int
    store_mib: int
    limits: Limits
    api_key: str | None
    keep_dropped: bool = False
    allowed_origins: Sequence[str] = ()


def run_server(
    serving: Serving,
    models: Sequence[Path | None],
    listener: socket.socket,
    *,
    check: Callable[[AnyModel], None] = lambda _model: None,
    on_listening: Callable[[str], None] = lambda _address: None,
) -> None:
    """Print the models and the address, and serve requests until Ctrl-C.

    Args:
        models: files or names of models; None for the demo model.
        listener: socket to listen on, which is closed at the end.
        check: called with the first model when it is loaded.
        on_listening: called with the address of the page after it was printed.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed before the server started.
    """
    verbose = serving.options.verbose
    share_freed_memory()
    with closing(listener):
        with closing(server.ServedModels(model_sources(serving, models), serving.limits)) as served:
            with loading.watched_load(Bars(hidden=verbose)) as on_load:
                first = served.start(on_load)
            check(first)
            app = server.create_app(
                served, api_key=serving.api_key, allowed_origins=serving.allowed_origins
            )
            host, port = listener.getsockname()[:2]
            if serving.api_key is None and not ipaddress.ip_address(host).is_loopback:
                terminal.say(
                    "other machines can reach this server without a key: give --api-key, or remove "
                    "--host",
                    style="yellow",
                )
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            with suppress(KeyboardInterrupt):  # the regular way to stop
                _say_models(first, served.sources)
                terminal.say(f"listening on {address}/v1 · page at {address}/ · Ctrl-C stops")
                on_listening(f"{address}/")
                server.run(app, listener, verbose=verbose)
        terminal.say("stopped")


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        no_name = isinstance(error, socket.gaierror)
        reason = error.strerror if no_name else os.strerror(error.errno or 0)
        raise InputError(
            f"cannot listen on {host} port {port}: {reason}; give another --host or --port"
        ) from None


def _say_models(first: AnyModel, sources: Sequence[ModelSource]) -> None:
    """Print the models, the first one with the cache of each slot."""
    if isinstance(first, EmbeddingModel):
        n_values, n_ctx = first.embedder.n_values, first.embedder.window
        work = f"embeddings of {n_values:,} values, for texts of up to {n_ctx:,} tokens"
    else:
        n = first.engine.n_slots
        each = ", each" if n > 1 else ""
        work = f"{count(n, 'text')} at once{each}: {first.engine.report()[0].kv.summary()}"
    terminal.say(f"{first.name} · {work}", style="dim")
    for source in sources[1:]:
        work = "embeddings" if source.embeds else count(source.n_at_once, "text") + " at once"
        terminal.say(f"{source.name} · {work}, loaded on request", style="dim")


# -------------------------------------------------------------------------------------------------
# Models: checked when the server starts, loaded on request
# -------------------------------------------------------------------------------------------------


def model_sources(serving: Serving, given: Sequence[Path | None]) -> list[ModelSource]:
    """Return the models with their loaders.

    If there are several, each is described first, so that errors are reported at the start.
    """
    paths = [find_model(each) for each in given]
    headers = [_usable_header(path) for path in paths]
    machine = loading.machine_settings(serving.options)
    return [
        ModelSource(
            name=readable_name(path.stem),
            load=partial(
                _load_embedding if header.has_embeddings else _load_writing,
                serving if number == 0 else _without_projector(serving),
                path,
                machine,
            ),
            n_at_once=1 if header.has_embeddings else serving.texts,
            embeds=header.has_embeddings,
            needed_bytes=_needed_bytes(serving, path, header) if len(paths) > 1 else 0,
            identity=None if header.has_embeddings else ModelIdentity(**identify(path).record()),
            typed=str(typed or ""),
        )
        for number, (typed, path, header) in enumerate(zip(given, paths, headers, strict=True))
    ]


def _without_projector(serving: Serving) -> Serving:
    return replace(serving, options=replace(serving.options, mmproj=None))


def _usable_header(path: Path) -> ModelHeader:
    header = read_header(path)
    if not header.causal and not header.has_embeddings:
        raise UnsupportedModelError(
            f"{path} cannot be served: it is neither a causal model, which generates text, nor an "
            "embedding model, as its file has no pooling type"
        )
    return header


def _load_writing(
    serving: Serving, path: Path, machine: dict[str, Any], on_load: Callable[[float], None]
) -> ServedModel:
    how = {"texts": serving.texts, "store_mib": serving.store_mib}
    engine = loading.open_engine(path, serving.options, machine, on_load, **how)
    return ServedModel(
        engine, readable_name(path.stem), serving.limits, keep_dropped=serving.keep_dropped
    )


def _load_embedding(
    serving: Serving, path: Path, machine: dict[str, Any], on_load: Callable[[float], None]
) -> EmbeddingModel:
    names = ("n_gpu_layers", "n_threads", "n_threads_batch")
    model = Embedder(
        path,
        n_ctx=serving.options.ctx,
        parameters=Parameters(**{name: machine[name] for name in names}),
        rpc_servers=machine["rpc_servers"],
        load_progress=on_load,
        verbose=machine["verbose"],
    )
    return EmbeddingModel(model, readable_name(path.stem), serving.limits)


def _needed_bytes(serving: Serving, path: Path, header: ModelHeader) -> int:
    """Estimate the memory of a model: weights, and the caches of all slots."""
    options = serving.options
    if header.has_embeddings:
        return header.file_bytes + embedding_bytes(header, options.ctx)
    found = describe_model(
        path,
        options.eviction,
        n_ctx=options.ctx or header.trained_context,
        kv_type=options.kv_type.value,
    )
    if found.refused is not None and not options.no_evict:
        raise UnsupportedModelError(
            f"{path}: {found.refused}; --no-evict keeps the full cache, for all models"
        )
    cache = found.full if options.no_evict else found.evicting
    return header.file_bytes + (0 if cache is None else serving.texts * cache.total)
