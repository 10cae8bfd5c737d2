"""`pyh2o chat --web`: a chat in the browser, from a server that only this machine can reach."""

from __future__ import annotations

import os
import socket
import webbrowser
from collections.abc import Set
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import quote

import typer

from pyh2o.errors import UnsupportedModelError
from pyh2o.limits import Limits
from pyh2o.sessions.chats import open_chats
from pyh2o.writing.sampling import Sampling

from ..errors import InputError
from ..options import RunOptions
from ..session_options import saved_options
from ..terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.server.models import AnyModel

HOST = "127.0.0.1"
PORT = 8000
# Number of slots: one to answer in, and one to look at another session meanwhile.
TEXTS = 2

# Names of options that only a chat in the terminal has.
_IN_TERMINAL = {
    *("system", "max_tokens", *vars(Sampling())),
    *("card", "user", "lorebook"),
    *("fair_turns", "no_save", "mcp", "allow_tool"),
}


def refuse_what_the_page_lacks(context: typer.Context, given: Set[str]) -> None:
    """Raise an InputError for given options that only a chat in the terminal has."""
    for option in context.command.params:
        if option.name in given & _IN_TERMINAL:
            typed = max(option.opts, key=len)
            raise InputError(
                f"{typed} cannot be used with --web: use the page's Settings, or omit --web"
            )


def chat_on_page(
    options: RunOptions, given: Set[str], opened: str | None, limits: Limits, store_mib: int
) -> None:
    """Serve the page to this machine until Ctrl-C, and open it in a browser.

    Args:
        options: options with defaults.
        given: names of the typed options.
        opened: the session to resume; None for a new one.
        limits: limits of answers.
        store_mib: maximum MiB of snapshots.
    """
    # Imported here because it loads llama.cpp, which would delay `--help`.
    from pyh2o.server import EmbeddingModel

    from ..serving import Serving, run_server

    route = ""
    if opened is not None:
        with open_chats() as database:
            text = database.find(opened)
            if text is None:
                raise InputError(
                    f"unknown session {opened}: omit --session, and start a new one on the page"
                )
            route = f"#/s/{quote(opened, safe='')}"
            options = saved_options(options, given, database.info(text).settings)

    def check(model: AnyModel) -> None:
        if isinstance(model, EmbeddingModel):
            raise UnsupportedModelError(
                f"{model.name} is an embedding model: give a model that generates text (--model)"
            )

    api_key = os.environ.get("PYH2O_API_KEY") or None  # as in `serve`
    run_server(
        Serving(options, TEXTS, store_mib, limits, api_key),
        [options.model],
        _listen(),
        check=check,
        # in a thread, as some browsers return only when they are closed
        on_listening=lambda page: Thread(target=_open, args=[page + route], daemon=True).start(),
    )


def _listen() -> socket.socket:
    from ..serving import listen

    try:
        return listen(HOST, PORT)
    except InputError:
        return listen(HOST, 0)


def _open(address: str) -> None:
    opened = False
    with suppress(webbrowser.Error):
        browser = webbrowser.get()
        # Text browsers run no scripts: use one only if the user has chosen it.
        is_text = type(browser) is webbrowser.GenericBrowser and not os.environ.get("BROWSER")
        opened = not is_text and browser.open(address)
    if not opened:
        terminal.say(f"cannot open a browser: the page is {address}")
