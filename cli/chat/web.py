"""`pyh2o chat --web`: the page of a server that only this machine reaches, in a browser."""

from __future__ import annotations

import os
import socket
import threading
import webbrowser
from collections.abc import Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer

from pyh2o.errors import UnsupportedModelError
from pyh2o.generation.sampling import Sampling
from pyh2o.openai.limits import DEFAULT_STORE_MIB, Limits
from pyh2o.sessions.saved import SavedChat
from pyh2o.sessions.session_file import read_overview

from ..errors import InputError
from ..options import RunOptions
from ..serving import listen, run_server, started_server
from ..terminal.terminal import terminal
from .opening import saved_options, with_limit

if TYPE_CHECKING:
    from pyh2o.openai.server.models import AnyModel

HOST = "127.0.0.1"
PORT = 8000
# One that is answered, and one that is looked at meanwhile.
TEXTS = 2

_IN_SETTINGS = "it is among the Settings of the page"
# What only a chat in the terminal has, by the option's name, and what there is in its place.
_IN_TERMINAL = {
    "system": _IN_SETTINGS,
    "max_tokens": _IN_SETTINGS,
    **dict.fromkeys(vars(Sampling()), _IN_SETTINGS),
    "plain": "the page always shows Markdown",
    "fair_turns": "chats of the page have no such shares",
    "copies_mib": "the page has a limit of its own",
    "reread": "open the session in the terminal once, and go on here",
    "no_save": "what is said on the page is saved",
}


def refuse_what_the_page_lacks(context: typer.Context, given: Set[str]) -> None:
    """Refuse options that only a chat in the terminal has.

    Args:
        context: of the command.
        given: names of those that are to have an effect.

    Raises:
        InputError: one of them is such an option.
    """
    for option in context.command.params:
        if option.name in given and option.name in _IN_TERMINAL:
            typed = max(option.opts, key=len)
            raise InputError(f"{typed} is for chats without --web: {_IN_TERMINAL[option.name]}")


def chat_on_page(options: RunOptions, given: Set[str], opened: SavedChat | None) -> None:
    """Serve the page to this machine until Ctrl-C, and open it.

    Args:
        options: the options as they are, with defaults.
        given: names of those that the user typed.
        opened: the chat to go on with; None for a new one.

    Raises:
        PyH2OError: the chat cannot be gone on with, or there is no model or no server for that.
        KeyboardInterrupt: Ctrl-C was pressed before it was served.
    """
    header = None if opened is None else _header(opened)
    if header is not None:
        options = saved_options(options, given, header, reread=False)
    options = with_limit(options)
    route = "" if opened is None else f"#/s/{quote(opened.name, safe='')}"
    with started_server(
        options, [options.model], _listen, texts=TEXTS, store_mib=DEFAULT_STORE_MIB, limits=Limits()
    ) as started:
        _check_chat(started.first, header)
        run_server(
            started,
            # as `serve` has it
            api_key=os.environ.get("PYH2O_API_KEY") or None,
            verbose=options.verbose,
            on_listening=lambda page: _open_beside(f"{page}{route}"),
        )


def _header(chat: SavedChat) -> dict[str, Any]:
    if not chat.path.exists():
        raise InputError(
            f"there is no session {chat.name} to open: leave --session out, and begin it there"
        )
    return read_overview(chat.path).header


def _listen() -> socket.socket:
    try:
        return listen(HOST, PORT)
    except InputError:
        return listen(HOST, 0)


def _check_chat(model: AnyModel, header: Mapping[str, Any] | None) -> None:
    """Refuse a model without chats, and a session that does not fit it.

    Raises:
        UnsupportedModelError: it makes embeddings.
        SessionError: the session was made with another model or other settings.
    """
    # Imported here, as the server, because it loads llama.cpp.
    from pyh2o.openai.server import EmbeddingModel
    from pyh2o.sessions.identity import check_same_header

    if isinstance(model, EmbeddingModel):
        raise UnsupportedModelError(
            f"{model.name} makes embeddings and writes no text: give another model (--model)"
        )
    if header is not None:
        check_same_header(header, model.engine.model)


def _open_beside(address: str) -> None:
    """Open an address in the browser; some programs for that only return when they are left."""
    threading.Thread(target=partial(_open, address), daemon=True).start()


def _open(address: str) -> None:
    if not _browser_opens(address):
        terminal.say(f"no browser could be opened here: the page is {address}")


def _browser_opens(address: str) -> bool:
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    # One of those that draw in this terminal, which run no scripts, unless it is the user's choice.
    if type(browser) is webbrowser.GenericBrowser and not os.environ.get("BROWSER"):
        return False
    return browser.open(address)
