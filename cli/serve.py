"""`pyh2o serve`: an HTTP server for OpenAI clients and browsers."""

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

from .options import MODEL, Mmproj, ModelOptions, NoThinking, ReasoningBudget, takes_run_options
from .shell_completion import complete_model

_server_option = partial(typer.Option, rich_help_panel="Server")


def _checked_origins(origins: list[str] | None) -> list[str] | None:
    for origin in origins or ():
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
            raise typer.BadParameter(
                f"{origin!r} is not an origin: give scheme, host and port without a path, such as "
                "http://localhost:3000"
            )
    return origins


@takes_run_options
def serve(
    *,
    options: ModelOptions,
    host: Annotated[
        str, _server_option(help="Address to listen on; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int, _server_option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        _server_option(
            envvar="PYH2O_API_KEY", help="API key that clients must send.", show_default="no check"
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        _server_option(
            callback=_checked_origins,
            help="Origin of web pages that may read responses, such as http://localhost:3000; may "
            "be given several times. The server's own page is always allowed.",
        ),
    ] = None,
    texts: Annotated[
        int,
        _server_option(
            min=1,
            help="Number of slots: each answers one request at a time, and has its own cache.",
        ),
    ] = DEFAULT_TEXTS,
    store_mib: Annotated[
        int,
        _server_option(
            min=0, help="Maximum MiB of cache snapshots of texts without a slot; 0 for none."
        ),
    ] = DEFAULT_STORE_MIB,
    keep_dropped: Annotated[
        bool,
        _server_option(
            "--keep-dropped",
            help="Keep messages in the context that a client drops to fit its window. Use it only "
            "if clients trust each other. keep_dropped in a request overrides it.",
        ),
    ] = False,
    max_body_mib: Annotated[
        int, _server_option(min=1, help="Maximum size of a request's body, in MiB.")
    ] = DEFAULT_BODY_MIB,
    max_prompt_tokens: Annotated[
        int | None,
        _server_option(
            min=1,
            help="Maximum tokens of a prompt.",
            show_default=f"{DEFAULT_WINDOWS} times the window",
        ),
    ] = None,
    max_wait: Annotated[
        float,
        _server_option(min=0, help="Maximum time that a request waits for a slot, in seconds."),
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
            help="GGUF file of a model, or a name from `pyh2o models list`; may be given several "
            "times.",
            show_default="the demo model, see `pyh2o models`",
            rich_help_panel=MODEL,
        ),
    ] = None,
    mmproj: Mmproj = None,
) -> None:
    """Serve models over HTTP with APIs compatible to OpenAI's.

    --texts requests are answered at the same time; others wait. A chat that continues is not read
    again. Each request has its own sampling options, and may override those for reasoning. Of
    several models, the first is loaded at once and the others on request; idle ones are unloaded if
    memory is short. Embedding models serve embeddings. --mmproj belongs to the first model.
    --recall-mib limits the archive of each text.
    """
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
