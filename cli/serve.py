"""`pyh2o serve`: models behind an HTTP server, for OpenAI's clients and for browsers."""

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
from .options import MODEL, ModelOptions, takes_run_options
from .shell_completion import complete_model
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.openai.server import ServedModels
    from pyh2o.openai.server.models import AnyModel

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
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "-m",
            envvar="PYH2O_MODEL",
            autocompletion=complete_model,
            help="GGUF file of a model, or a name from `pyh2o models list`; may be given again: "
            "requests name the one they want.",
            show_default="the demo model, see `pyh2o models`",
            rich_help_panel=MODEL,
        ),
    ] = None,
) -> None:
    """Serve models over HTTP, to OpenAI's clients and all that speak like them.

    So many texts as --texts says are answered at the same time; further requests wait. A chat that
    goes on is not read again. The sampling comes with each request. Of several models the first is
    loaded at once and the others when they are asked for; those that nobody uses make room. A model
    that was made for embeddings has those.
    """
    with reported_errors():
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.openai import server

        from .served import model_sources

        with closing(listen(host, port)) as listener:
            limits = Limits(max_body_mib, max_prompt_tokens, max_wait)
            sources = model_sources(
                options, model or [None], texts=texts, store_mib=store_mib, limits=limits
            )
            with server.ServedModels(sources, limits) as models:
                with loading.watched_load(Bars(hidden=options.verbose)) as on_load:
                    first = models.start(on_load)
                app = server.create_app(models, api_key=api_key)
                warn_of_strangers(listener, api_key)
                with suppress(KeyboardInterrupt):  # the ordinary end
                    say_what(first, models)
                    say_where(listener)
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


def say_where(listener: socket.socket) -> None:
    """Say where clients find the server, and browsers its page."""
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    server = f"http://{shown}:{port}"
    terminal.say(f"listening on {server}/v1 · page at {server}/ · Ctrl-C stops")


def warn_of_strangers(listener: socket.socket, api_key: str | None) -> None:
    """Say so where other machines get in without a key."""
    address = listener.getsockname()[0]
    if api_key is None and not ipaddress.ip_address(address).is_loopback:
        terminal.say(
            "other machines can reach this without a key: give --api-key, or leave out --host",
            style="yellow",
        )
