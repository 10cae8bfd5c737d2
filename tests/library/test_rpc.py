"""Checks of servers before llama.cpp connects to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pyh2o.errors import ServerError, SettingsError
from pyh2o.library import backends, rpc, rpc_server
from pyh2o.library.rpc import check_server, parse_servers
from rpc_servers import needs_rpc, unused_address
from rpc_servers import rpc_server as running_server

GREETED = bytes([28]) + bytes(7)


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        (None, ()),
        ((), ()),
        ("a:1", ("a:1",)),
        ("a:1, b:2", ("a:1", "b:2")),
        (["a:1,b:2", "10.0.0.3:50052", "a:1"], ("a:1", "b:2", "10.0.0.3:50052")),
    ],
)
def test_lists_of_servers_are_parsed(given: object, servers: tuple[str, ...]) -> None:
    assert parse_servers(given) == servers  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:b", "[::1]:1", "a:1,"])
def test_an_invalid_server_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not a server: give host:port"):
        parse_servers(text)


@pytest.fixture
def impostor() -> Iterator[Callable[[bytes | None], str]]:
    """Return a function that starts a fake server with one reply or none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def start(answer: bytes | None) -> str:
            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    if answer is not None:
                        connection.sendall(answer)
                    connection.recv(1 << 10)

            if answer is not None:
                threading.Thread(target=serve, daemon=True).start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start


@needs_rpc
def test_a_server_of_this_build_is_accepted() -> None:
    with running_server() as address:
        check_server(address)
        check_server(address)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        GREETED + bytes([8, 0, 0, 0]) + bytes(24),
        GREETED + bytes([7, 99, 0, 0]) + bytes(24),
        GREETED + bytes([6, 0, 0, 0]) + bytes(24),
    ],
    ids=["nothing", "HTTP", "newer", "newer in part", "older"],
)
def test_another_version_or_protocol_is_refused(
    impostor: Callable[[bytes | None], str], answer: bytes
) -> None:
    with pytest.raises(ServerError, match="is not an RPC server of this version"):
        check_server(impostor(answer))


def test_a_busy_server_is_refused(
    impostor: Callable[[bytes | None], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "PATIENCE", 0.1)
    with pytest.raises(ServerError, match="is busy with another program"):
        check_server(impostor(None))


def test_an_unreachable_server_is_reported() -> None:
    address = unused_address()
    with pytest.raises(ServerError, match=f"{address} .Connection refused.: start"):
        check_server(address)
    with pytest.raises(ServerError, match=r"no-such-machine\.invalid:50052 \(.*\): start"):
        check_server("no-such-machine.invalid:50052")


def test_a_build_without_rpc_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "backend_function", lambda *_: None)
    with pytest.raises(ServerError, match="this build of pyh2o has no RPC backend"):
        rpc.Offloading(["127.0.0.1:1"])
    with pytest.raises(ServerError, match="this build of pyh2o has no RPC backend"):
        rpc_server.run("127.0.0.1", 1, 1, on_ready=pytest.fail, on_end=pytest.fail)
