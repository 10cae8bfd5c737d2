"""`pyh2o chat --web`: the page of a server that only this machine reaches, in a browser."""

from __future__ import annotations

import os
import socket
import webbrowser
from collections.abc import Set
from contextlib import suppress
from dataclasses import asdict
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import quote

import typer

from pyh2o.errors import UnsupportedModelError
from pyh2o.limits import Limits
from pyh2o.sessions.saved import SavedChat
from pyh2o.writing.sampling import Sampling

from ..errors import InputError
from ..options import RunOptions
from ..session_options import saved_options, with_limit
from ..terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.server.models import AnyModel

HOST = "127.0.0.1"
PORT = 8000
# One that is answered, and one that is looked at meanwhile.
TEXTS = 2

# What only a chat in the terminal has, by the option's name.
_IN_TERMINAL = {
    *("system", "max_tokens", *vars(Sampling())),
    *("card", "user", "lorebook"),
    *("fair_turns", "reread", "no_save", "mcp", "allow_tool"),
}


def refuse_what_the_page_lacks(context: typer.Context, given: Set[str]) -> None:
    """Refuse the options, by their names, that only a chat in the terminal has."""
    for option in context.command.params:
        if option.name in given & _IN_TERMINAL:
            typed = max(option.opts, key=len)
            raise InputError(
                f"{typed} is for chats without --web: the page saves, and has Settings"
            )


def chat_on_page(
    options: RunOptions, given: Set[str], opened: SavedChat | None, limits: Limits, store_mib: int
) -> None:
    """Serve the page to this machine until Ctrl-C, and open it.

    Args:
        options: the options as they are, with defaults.
        given: names of those that the user typed.
        opened: the chat to go on with; None for a new one.
        limits: of its answers.
        store_mib: maximum MiB of snapshots.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.server import EmbeddingModel
    from pyh2o.sessions.listing import read_saved_text

    from ..serving import Serving, run_server

    header, route = None, ""
    if opened is not None:
        if not opened.path.exists():
            raise InputError(
                f"there is no session {opened.name} to open: leave --session out, and begin it "
                "there"
            )
        saved, route = read_saved_text(opened), f"#/s/{quote(opened.name, safe='')}"
        if saved.header is None:
            raise InputError(saved.trouble)
        header = saved.header
        options = saved_options(options, given, asdict(header), reread=False)

    def check(model: AnyModel) -> None:
        if isinstance(model, EmbeddingModel):
            raise UnsupportedModelError(
                f"{model.name} makes embeddings and writes no text: give another model (--model)"
            )
        if header is not None:
            header.check_made_with(model.engine.model)

    api_key = os.environ.get("PYH2O_API_KEY") or None  # as `serve` has it
    run_server(
        Serving(with_limit(options), TEXTS, store_mib, limits, api_key),
        [options.model],
        _listen(),
        check=check,
        # beside the server: some browsers only return when they are left
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
        # Some draw in this terminal and run no scripts: only if that is the user's choice.
        draws_here = type(browser) is webbrowser.GenericBrowser and not os.environ.get("BROWSER")
        opened = not draws_here and browser.open(address)
    if not opened:
        terminal.say(f"no browser could be opened here: the page is {address}")
