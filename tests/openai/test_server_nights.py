"""A machine that sleeps while clients are connected: nobody was slow meanwhile."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from needed import needed
from pyh2o.engine import Engine

loopback = needed("loopback", name="the server's packages")

COMPLETIONS = "/v1/completions"
REQUEST = loopback.request_bytes(COMPLETIONS, {"prompt": "once", "max_tokens": 3})
STREAM = {"prompt": "once", "max_tokens": 500, "logit_bias": {"2": -100}, "stream": True}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[Any]:
    """Of one test: it must not see the clock go back behind it."""
    running = loopback.LoopbackServer(engine)
    running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield running
    running.close()


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch, server: Any) -> Callable[[], None]:
    """Hours pass for the server, which looks at its timers then."""
    real, nights = time.monotonic, [0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + 36_000 * len(nights))

    def sleep() -> None:
        nights.append(0)
        for _ in range(2):
            assert server.get("/health").status == 200

    return sleep


def test_a_request_that_has_begun(server: Any, sleep: Callable[[], None]) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as client:
        client.sendall(REQUEST[:20])
        server.answers_well()  # so it has come
        sleep()
        client.sendall(REQUEST[20:])
        assert client.recv(2**16).startswith(b"HTTP/1.1 200")


def test_a_stream_that_nobody_reads_at_night(server: Any, sleep: Callable[[], None]) -> None:
    def waits_for_reader() -> bool:
        there = list(server._server.server_state.connections)
        return any(each.transport.get_write_buffer_size() for each in there)

    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(loopback.PATIENCE)
        client.connect(("127.0.0.1", server.port))
        client.sendall(loopback.request_bytes(COMPLETIONS, STREAM))
        loopback.wait_until(waits_for_reader)
        sleep()
        data = b""
        while b"[DONE]" not in data[-100:]:
            piece = client.recv(2**16)
            assert piece, data[-200:]
            data += piece
