"""Ctrl-C in the moment in which a server begins to listen, and the end by SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest

from needed import needed
from pyh2o.engine import Engine

loopback = needed("loopback", name="the server's packages")


@pytest.mark.filterwarnings("error")
def test_ctrl_c_while_the_loop_is_made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the server in order, and no half-made loop complains of it."""
    from pyh2o.server import create_app, run

    models = loopback.only(engine, None)
    ended: list[bool] = []
    monkeypatch.setattr(models, "shut_down", lambda: ended.append(True))
    real = time.get_clock_info

    def pressed(name: Any) -> Any:  # asyncio asks for it while it makes a loop
        monkeypatch.setattr(time, "get_clock_info", real)
        signal.raise_signal(signal.SIGINT)
        return real(name)

    monkeypatch.setattr(time, "get_clock_info", pressed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(KeyboardInterrupt):
            run(create_app(models), listener)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ended == [True]


def test_sessions_are_let_go_before_sigterm_ends_the_program(engine: Engine, chats: Path) -> None:
    """Else the files that lock them stay."""
    from pyh2o.server import create_app, run
    from session_client import SESSIONS

    app = create_app(loopback.only(engine, None))
    there: list[list[str]] = []

    def locks() -> list[str]:
        return [path.name for path in chats.glob(".*.lock")]

    def use_and_end() -> None:
        body = b'{"name": "talk"}'
        asked = Request(address + SESSIONS, body, {"Content-Type": "application/json"})
        urlopen(asked).close()
        there.append(locks())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: there.append(locks()))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = Thread(target=use_and_end)
            client.start()
            run(app, listener)
            client.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert there == [[".talk.lock"], []]
