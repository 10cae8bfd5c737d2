"""`pyh2o serve`: the model behind an HTTP server that OpenAI's clients can talk to."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.openai.limits import (
    DEFAULT_BODY_MIB,
    DEFAULT_STORE_MIB,
    DEFAULT_TEXTS,
    DEFAULT_WAIT_SECONDS,
    DEFAULT_WINDOWS,
    Limits,
)

from . import loading
from .errors import InputError, reported_errors
from .options import ModelOptions, takes_run_options
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.engine import Engine

SERVER = "Server"


@takes_run_options
def serve(
    *,
    options: ModelOptions,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 lets other machines in.", rich_help_panel=SERVER
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port to listen on; 0 takes a free one.", rich_help_panel=SERVER
        ),
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PYH2O_API_KEY",
            help="What clients have to send as their API key.",
            show_default="anything will do",
            rich_help_panel=SERVER,
        ),
    ] = None,
    texts: Annotated[
        int,
        typer.Option(
            min=1,
            help="Texts that are read and written at the same time, each with a cache of its own.",
            rich_help_panel=SERVER,
        ),
    ] = DEFAULT_TEXTS,
    store_mib: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most MiB for texts that others came after, to go on where they were; 0 for none.",
            rich_help_panel=SERVER,
        ),
    ] = DEFAULT_STORE_MIB,
    max_body_mib: Annotated[
        int,
        typer.Option(min=1, help="Most MiB of a request's body.", rich_help_panel=SERVER),
    ] = DEFAULT_BODY_MIB,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a prompt.",
            show_default=f"{DEFAULT_WINDOWS} times the window",
            rich_help_panel=SERVER,
        ),
    ] = None,
    max_wait: Annotated[
        float,
        typer.Option(
            min=0,
            help="Longest wait of a request while others have all places, in seconds.",
            rich_help_panel=SERVER,
        ),
    ] = DEFAULT_WAIT_SECONDS,
) -> None:
    """Serve the model over HTTP, to OpenAI's clients and all that speak like them.

    So many texts as --texts says are answered at the same time; further requests wait. A chat that
    goes on is not read again. The sampling comes with each request.
    """
    with reported_errors():
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.openai import server

        with closing(listen(host, port)) as listener:
            bars = Bars(hidden=options.verbose)
            loaded = loading.load_engine(options, bars, texts=texts, store_mib=store_mib)
            with closing(loaded) as engine:
                name = Path(engine.model.model_path).stem
                limits = Limits(max_body_mib, max_prompt_tokens, max_wait)
                app = server.create_app(engine, name=name, api_key=api_key, limits=limits)
                warn_of_strangers(listener, api_key)
                with suppress(KeyboardInterrupt):  # the ordinary end
                    say_where(listener, name, engine)
                    server.run(app, listener, verbose=options.verbose)
        terminal.say("stopped")


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


def say_where(listener: socket.socket, name: str, engine: Engine) -> None:
    """Say where clients find the model, and what the cache of each text is."""
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    n, cache = engine.n_places, engine.report()[0].kv.summary()
    at_once = f"{count(n, 'text')} at once" + (", each" if n > 1 else "")
    terminal.say(f"{name} · {at_once}: {cache}", style="dim")
    terminal.say(f"listening on http://{shown}:{port}/v1 · Ctrl-C stops")


def warn_of_strangers(listener: socket.socket, api_key: str | None) -> None:
    """Say so where other machines get in without a key."""
    address = listener.getsockname()[0]
    if api_key is None and not ipaddress.ip_address(address).is_loopback:
        terminal.say(
            "other machines can reach this without a key: give --api-key, or leave out --host",
            style="yellow",
        )
