"""A server in the terminal, for `serve` and `chat --web`: its port, what it says, and its end."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.openai.limits import Limits
from pyh2o.system.memory import share_freed_memory

from . import loading
from .errors import InputError
from .options import ModelOptions
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.openai.server import ServedModels
    from pyh2o.openai.server.models import AnyModel


def listen(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, which takes longer.

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


@dataclass(frozen=True)
class Started:
    """A server that is about to answer.

    Attributes:
        listener: where it listens.
        models: that it serves.
        first: of them, which is loaded.
    """

    listener: socket.socket
    models: ServedModels
    first: AnyModel


@contextmanager
def started_server(
    options: ModelOptions,
    given: Sequence[Path | None],
    take_port: Callable[[], socket.socket],
    *,
    texts: int,
    store_mib: int,
    limits: Limits,
) -> Iterator[Started]:
    """A server with its port and its models, until the end of this, which is said.

    Args:
        take_port: called before the models are loaded.
        options, given, texts, store_mib, limits: as `model_sources` has them.

    Raises:
        PyH2OError: a model cannot be served, a package is missing, or what `take_port` raises.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.openai import server

    from .served import model_sources

    share_freed_memory()
    with closing(take_port()) as listener:
        sources = model_sources(options, given, texts=texts, store_mib=store_mib, limits=limits)
        with server.ServedModels(sources, limits) as models:
            with loading.watched_load(Bars(hidden=options.verbose)) as on_load:
                first = models.start(on_load)
            yield Started(listener, models, first)
    terminal.say("stopped")


def run_server(
    started: Started,
    *,
    api_key: str | None,
    verbose: bool,
    on_listening: Callable[[str], None] = lambda _address: None,
) -> None:
    """Say what is served and where, and answer until Ctrl-C.

    Args:
        started: the server.
        api_key: what clients have to send; None lets everyone in.
        verbose: log every request.
        on_listening: called with the page's address when that has been said.
    """
    # Imported here because it loads llama.cpp.
    from pyh2o.openai import server

    app = server.create_app(started.models, api_key=api_key)
    warn_of_strangers(started.listener, api_key)
    with suppress(KeyboardInterrupt):  # the ordinary end
        say_what(started.first, started.models)
        say_where(started.listener)
        on_listening(f"{address_of(started.listener)}/")
        server.run(app, started.listener, verbose=verbose)


def say_what(first: AnyModel, models: ServedModels) -> None:
    """Say what is served: of the first model also what the cache of each text is."""
    terminal.say(f"{first.name} · {_work_of(first)}", style="dim")
    for source in models.sources[1:]:
        work = "embeddings" if source.embeds else count(source.n_at_once, "text") + " at once"
        terminal.say(f"{source.name} · {work}, loaded when it is asked for", style="dim")


def _work_of(model: AnyModel) -> str:
    # Imported here because it loads llama.cpp.
    from pyh2o.openai.server import EmbeddingModel

    if isinstance(model, EmbeddingModel):
        n_values, n_ctx = model.llama.n_values, model.llama.n_ctx()
        return f"embeddings of {n_values:,} values, for texts of up to {n_ctx:,} tokens"
    n = model.engine.n_places
    return (
        f"{count(n, 'text')} at once{', each' if n > 1 else ''}: "
        f"{model.engine.report()[0].kv.summary()}"
    )


def address_of(listener: socket.socket) -> str:
    """The address of a server, without a path."""
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{port}"


def say_where(listener: socket.socket) -> None:
    """Say where clients find the server, and browsers its page."""
    server = address_of(listener)
    terminal.say(f"listening on {server}/v1 · page at {server}/ · Ctrl-C stops")


def warn_of_strangers(listener: socket.socket, api_key: str | None) -> None:
    """Say so where other machines get in without a key."""
    address = listener.getsockname()[0]
    if api_key is None and not ipaddress.ip_address(address).is_loopback:
        terminal.say(
            "other machines can reach this without a key: give --api-key, or leave out --host",
            style="yellow",
        )
