"""`pyh2o serve`: models behind an HTTP server, for OpenAI's clients and for browsers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pyh2o.limits import (
    DEFAULT_BODY_MIB,
    DEFAULT_STORE_MIB,
    DEFAULT_TEXTS,
    DEFAULT_WAIT_SECONDS,
    DEFAULT_WINDOWS,
    Limits,
)

from .options import (
    MODEL,
    Mmproj,
    ModelOptions,
    NoThinking,
    ReasoningBudget,
    takes_run_options,
)
from .shell_completion import complete_model

_server_option = partial(typer.Option, rich_help_panel="Server")


def _checked_origins(origins: list[str] | None) -> list[str] | None:
    for origin in origins or ():
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
            raise typer.BadParameter(
                f"{origin!r} is not an origin: give scheme, host and port as in "
                "http://localhost:3000, without a path"
            )
    return origins


@takes_run_options
def serve(
    *,
    options: ModelOptions,
    host: Annotated[
        str, _server_option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, _server_option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        _server_option(
            envvar="PYH2O_API_KEY",
            help="What clients have to send as their API key.",
            show_default="anything will do",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        _server_option(
            callback=_checked_origins,
            help="Origin whose web pages may read responses, such as http://localhost:3000; may be "
            "given again. The server's own page always may.",
        ),
    ] = None,
    texts: Annotated[
        int,
        _server_option(
            min=1,
            help="Texts that are read and written at the same time, each with a cache of its own.",
        ),
    ] = DEFAULT_TEXTS,
    store_mib: Annotated[
        int,
        _server_option(
            min=0,
            help="Most MiB for texts that others came after, to go on where they were; 0 for none.",
        ),
    ] = DEFAULT_STORE_MIB,
    keep_dropped: Annotated[
        bool,
        _server_option(
            "--keep-dropped",
            help="Remember messages that a client leaves out to fit its window, if the others come "
            "back: for clients that trust each other. keep_dropped in a request says otherwise.",
        ),
    ] = False,
    max_body_mib: Annotated[
        int, _server_option(min=1, help="Most MiB of a request's body.")
    ] = DEFAULT_BODY_MIB,
    max_prompt_tokens: Annotated[
        int | None,
        _server_option(
            min=1,
            help="Most tokens of a prompt.",
            show_default=f"{DEFAULT_WINDOWS} times the window",
        ),
    ] = None,
    max_wait: Annotated[
        float,
        _server_option(
            min=0, help="Longest wait of a request while others have all places, in seconds."
        ),
    ] = DEFAULT_WAIT_SECONDS,
    reasoning_budget: ReasoningBudget = None,
    no_thinking: NoThinking = False,
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
    mmproj: Mmproj = None,
) -> None:
    """Serve models over HTTP, to OpenAI's clients and all that speak like them.

    So many texts as --texts says are answered at the same time; further requests wait. A chat that
    goes on is not read again. The sampling comes with each request, which may also say otherwise of
    thoughts. Of several models the first is
    loaded at once and the others when they are asked for; those that nobody uses make room. A model
    that was made for embeddings has those. --mmproj is that of the first. The archive of each text
    takes at most so much memory as --recall-mib says.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from .serving import Serving, listen, run_server

    limits = Limits(
        max_body_mib,
        max_prompt_tokens,
        max_wait,
        reasoning_budget=reasoning_budget,
        thinks=not no_thinking,
    )
    options = replace(options, mmproj=mmproj)
    origins = allow_origin or ()
    serving = Serving(options, texts, store_mib, limits, api_key, keep_dropped, origins)
    run_server(serving, model or [None], listen(host, port))
