"""Clients that are slow, silent, many, or none at all: they come to an end, others get answers."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from pyh2o.openai.limits import Limits
from pyh2o.sessions import story

loopback = needed("loopback", name="the server's packages")
connections = needed("pyh2o.openai.server.connections", name="the server's packages")
clients = needed("session_client", name="the server's packages")
requests = needed("pyh2o.openai.server.requests", name="the server's packages")
wait_until = loopback.wait_until

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "once", "max_tokens": 3}
ENDLESS = {"prompt": "once", "max_tokens": 10**9, "logit_bias": {"2": -100}}
A_WHILE = 0.5
# Of sockets: what the system keeps for a client that does not read.
LITTLE = 4096


@pytest.fixture
def alone_engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=1, n_ctx=256, hh=32, recent=32, slack=16) as running:
        yield running


@pytest.fixture
def server(alone_engine: Engine, chats: Path) -> Iterator[Any]:
    running = loopback.LoopbackServer(alone_engine, limits=Limits(body_mib=1))
    running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LITTLE)
    yield running
    running.close()


def connect(server: Any) -> socket.socket:
    """A connection whose client has little room for what it does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
    client.settimeout(loopback.PATIENCE)
    client.connect(("127.0.0.1", server.port))
    return client


def received(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection.

    Raises:
        TimeoutError: it does not.
    """
    data = b""
    try:
        while piece := client.recv(2**16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def received_until(client: socket.socket, text: bytes) -> bytes:
    """What comes, up to and with this text."""
    data = b""
    while text not in data:
        piece = client.recv(2**16)
        assert piece, data
        data += piece
    return data


def drip(client: socket.socket, piece: bytes) -> None:
    """Send a piece again and again, until the server has closed the connection."""
    end = time.monotonic() + loopback.PATIENCE
    try:
        while time.monotonic() < end:
            client.sendall(piece)
            time.sleep(A_WHILE / 10)
    except (ConnectionResetError, BrokenPipeError):
        return
    raise AssertionError("it goes on listening")


def answers_well(server: Any) -> None:
    """The next request is answered."""
    assert server.post(COMPLETIONS, SHORT).status == 200


# -------------------------------------------------------------------------------------------------
# Requests
# -------------------------------------------------------------------------------------------------


def test_a_connection_on_which_nothing_comes(server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "ASKING_SECONDS", A_WHILE)
    with connect(server) as client:
        assert received(client) == b""


def test_headers_that_come_byte_by_byte(server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "ASKING_SECONDS", A_WHILE)
    with connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
        drip(client, b"a")
    answers_well(server)


def test_headers_that_come_byte_by_byte_after_an_answer(server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "ASKING_SECONDS", A_WHILE)
    with connect(server) as client:
        client.sendall(loopback.request_bytes(COMPLETIONS, SHORT))
        assert client.recv(2**16).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        drip(client, b"a")


def test_a_request_may_come_in_pieces(server: Any) -> None:
    with connect(server) as client:
        for byte in loopback.request_bytes(COMPLETIONS, SHORT):
            client.sendall(bytes([byte]))
        assert client.recv(2**16).startswith(b"HTTP/1.1 200")


def test_a_body_that_never_comes(server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests, "BODY_SECONDS", A_WHILE)
    monkeypatch.setattr(connections, "ASKING_SECONDS", A_WHILE)
    with connect(server) as client:
        client.sendall(loopback.request_bytes(COMPLETIONS, SHORT)[:-5])
        answer = received_until(client, b"the body came too slowly")
        assert answer.startswith(b"HTTP/1.1 408")
    answers_well(server)


def test_a_body_that_comes_byte_by_byte(server: Any, monkeypatch: Any) -> None:
    """As chunks, which have no end: after its refusal the connection is closed as well."""
    monkeypatch.setattr(requests, "BODY_SECONDS", A_WHILE)
    monkeypatch.setattr(connections, "ASKING_SECONDS", A_WHILE)
    with connect(server) as client:
        client.sendall(chunked())
        drip(client, b"1\r\n{\r\n")
    answers_well(server)


def test_a_body_of_chunks_that_is_too_long(server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests, "DRAIN_SECONDS", A_WHILE)
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    with connect(server) as client:
        client.sendall(chunked() + 17 * chunk)  # and no end
        answer = received_until(client, b"the body has more than 1 MiB")
    assert answer.startswith(b"HTTP/1.1 413")
    answers_well(server)


def chunked(content_type: str = "application/json") -> bytes:
    """The head of a request whose body comes in chunks."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: tests\r\nContent-Type: {content_type}\r\n"
    return (head + "Transfer-Encoding: chunked\r\n\r\n").encode()


# -------------------------------------------------------------------------------------------------
# No requests
# -------------------------------------------------------------------------------------------------


def test_garbage_behind_a_request(server: Any) -> None:
    with connect(server) as client:
        client.sendall(loopback.request_bytes(COMPLETIONS, SHORT) + b"\x00\xff garbage\r\n\r\n")
        answers = received(client)
    assert answers.count(b"HTTP/1.1 ") == 2
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 400" in answers
    answers_well(server)


def test_garbage_in_a_body_that_was_refused(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It was a traceback in the terminal."""
    with connect(server) as client:
        client.sendall(chunked("text/plain"))
        assert client.recv(2**16).startswith(b"HTTP/1.1 415")
        client.sendall(b"no length\r\n\r\n")
        received(client)
    answers_well(server)
    assert [each for each in caplog.records if each.levelno > logging.WARNING] == []


# -------------------------------------------------------------------------------------------------
# Answers that nobody reads
# -------------------------------------------------------------------------------------------------


def test_a_stream_that_nobody_reads_ends(
    server: Any, alone_engine: Engine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(connections, "READING_SECONDS", A_WHILE)
    with connect(server) as client:
        client.sendall(loopback.request_bytes(COMPLETIONS, {**ENDLESS, "stream": True}))
        wait_until(lambda: alone_engine.texts.drawn_tokens > 0)
        wait_until(lambda: alone_engine.n_running == 0)
        answers_well(server)


def test_what_nobody_reads_of_a_session_is_kept(
    server: Any, alone_engine: Engine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(connections, "READING_SECONDS", A_WHILE)
    monkeypatch.setattr(story, "is_end_token", lambda _llm, _token: False)
    sessions = clients.SessionClient(server)
    sessions.begin("unread", kind="story", text="Once upon a time")
    request = loopback.request_bytes("/v1/sessions/unread/passages", {"max_tokens": 10**9})
    with connect(server) as client:
        client.sendall(request.replace(b"Host: tests", b"Host: 127.0.0.1"))
        wait_until(lambda: alone_engine.report()[0].kv.position > 100)
        wait_until(lambda: alone_engine.n_running == 0)
    assert len(sessions.got("/unread")["text"]) > 200


def test_a_client_that_reads_slowly_gets_all(server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "READING_SECONDS", A_WHILE)
    with connect(server) as client:
        body = {**ENDLESS, "max_tokens": 300, "stream": True}
        client.sendall(loopback.request_bytes(COMPLETIONS, body))
        data = b""
        while piece := client.recv(1024):
            data += piece
            if b"data: [DONE]" in data:
                break
            time.sleep(A_WHILE / 50)
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    finishes = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines]
    assert finishes[-1] == "length"


# -------------------------------------------------------------------------------------------------
# Many of them
# -------------------------------------------------------------------------------------------------


def test_connections_without_requests_make_room(
    server: Any, alone_engine: Engine, monkeypatch: Any
) -> None:
    """The oldest of them goes, and none that is answered."""
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 10)
    at_work = server.send(COMPLETIONS, {**ENDLESS, "stream": True})
    wait_until(lambda: alone_engine.texts.drawn_tokens > 0)
    silent = [connect(server) for _ in range(60)]
    assert server.get("/health").status == 200
    for client in silent[:50]:
        assert received(client) == b""
    assert alone_engine.n_running == 1
    for client in (*silent, at_work):
        client.close()
    wait_until(lambda: alone_engine.n_running == 0)
    answers_well(server)


@pytest.mark.parametrize(("files", "most"), [(256, 128), (10**6, 1000), (-1, 1000)])
def test_connections_leave_files_to_sessions(monkeypatch: Any, files: int, most: int) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (files, files))
    assert connections.most_connections() == most
