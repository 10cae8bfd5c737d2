"""Ctrl-C in the moment in which a server begins to listen."""

from __future__ import annotations

import signal
import socket
import time
from typing import Any

import pytest

from cli_fakes import ctrl_c_reaches_us
from needed import needed
from pyh2o.engine import Engine

loopback = needed("loopback", name="the server's packages")


@pytest.mark.filterwarnings("error")
def test_ctrl_c_while_the_loop_is_made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the server in order, and no half-made loop complains of it."""
    from pyh2o.openai.server import create_app, run

    models = loopback.only(engine, None)
    ended: list[bool] = []
    monkeypatch.setattr(models, "shut_down", lambda: ended.append(True))
    real = time.get_clock_info

    def pressed(name: Any) -> Any:  # asyncio asks for it while it makes a loop
        monkeypatch.setattr(time, "get_clock_info", real)
        signal.raise_signal(signal.SIGINT)
        return real(name)

    monkeypatch.setattr(time, "get_clock_info", pressed)
    with ctrl_c_reaches_us(), socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(KeyboardInterrupt):
            run(create_app(models), listener)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ended == [True]
