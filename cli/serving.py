"""A server in the terminal, for `serve` and `chat --web`: its models, its port and what it says.

It loads llama.cpp, so commands import it when they run.
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
from pyh2o.sessions.headers import ModelIdentity
from pyh2o.system.memory import share_freed_memory

from . import loading
from .errors import InputError
from .options import ModelOptions
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count


@dataclass(frozen=True)
class Serving:
    """What is served, and how.

    Attributes:
        options: for each model.
        texts: places for texts, of each model that writes.
        store_mib: most MiB for texts without a place, of each model that writes.
        limits: of requests.
        api_key: what clients have to send; None lets everyone in.
        keep_dropped: whether a text goes on that a client has dropped messages from.
        allowed_origins: origins whose web pages may read responses.
    """

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
    """Say what is served and where, and answer until Ctrl-C.

    Args:
        serving: how.
        models: their files or names; None for the demo model.
        listener: where; it is closed at the end.
        check: called with the first model when it is loaded.
        on_listening: called with the page's address when that has been said.

    Raises:
        PyH2OError: a model cannot be served, or what `check` raises.
        KeyboardInterrupt: Ctrl-C was pressed before it was served.
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
                    "other machines can reach this without a key: give --api-key, or leave out "
                    "--host",
                    style="yellow",
                )
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            with suppress(KeyboardInterrupt):  # the ordinary end
                _say_models(first, served.sources)
                terminal.say(f"listening on {address}/v1 · page at {address}/ · Ctrl-C stops")
                on_listening(f"{address}/")
                server.run(app, listener, verbose=verbose)
        terminal.say("stopped")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        InputError: another program has it, or there is no such address.
    """
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
    """Say what is served: of the first model also what the cache of each text is."""
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
        terminal.say(f"{source.name} · {work}, loaded when it is asked for", style="dim")


# -------------------------------------------------------------------------------------------------
# The models: looked at when the server starts, loaded when they are needed
# -------------------------------------------------------------------------------------------------


def model_sources(serving: Serving, given: Sequence[Path | None]) -> list[ModelSource]:
    """The models as the server loads them.

    Of several models each is described first: what would keep one from being loaded is said now.

    Raises:
        PyH2OError: a model that is missing, broken or refused, or settings that make no sense.
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
            f"{path} cannot be served: its tokens see the whole text, so it writes none, and its "
            "file has no pooling type that makes an embedding of them"
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
    """About what a model takes of the memory: the weights, and the caches of all its places.

    Raises:
        PyH2OError: it cannot be loaded with these settings.
    """
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
