"""Servers that compute layers for other processes, each a process of this machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cli_fakes import PATIENCE, start_program
from pyh2o import build_info

needs_rpc = pytest.mark.skipif(
    "rpc" not in str(build_info()["backends"]), reason="needs a build without -DGGML_RPC=OFF"
)


class RPCServer:
    """`pyh2o rpc-server` on a free port; `notes` is its output until it listened."""

    def __init__(self, *arguments: str) -> None:
        self.process = start_program("rpc-server", "--port", "0", "--threads", "1", *arguments)
        self.notes = ""
        while (found := re.search(r"listening on (\S+:\d+)", self.notes)) is None:
            assert self.process.stderr is not None
            line = self.process.stderr.readline().decode()
            assert line, f"it ended: {self.notes}"
            self.notes += line
        self.address = found[1]

    def end(self) -> tuple[int, str]:
        """Wait for its end. Return the exit code and the remaining output."""
        _, notes = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, notes.decode()

    def kill(self) -> None:
        """Kill it, as a crash would."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


@contextmanager
def rpc_server() -> Iterator[str]:
    """Return the address of a loopback server."""
    server = RPCServer()
    try:
        yield server.address
    finally:
        server.kill()


def unused_address() -> str:
    """Return a loopback address without a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
