"""Layers on other machines: clients of ggml's RPC backend.

llama.cpp ends the process if a server cannot be reached or does not speak its protocol. So each
server is greeted with that protocol first, with a timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import llama_cpp

from ..errors import ServerError, SettingsError
from . import backends
from .backends import Device

DEFAULT_PORT = 50052
PATIENCE = 5.0
"""Timeout of a greeting, in seconds."""

ALL_LAYERS = -1

# RPC_CMD_HELLO, the size of the rest, and the capabilities of the connection: TCP only.
_CAPABILITIES = bytes(24)
_GREETING = bytes([14]) + len(_CAPABILITIES).to_bytes(8, "little") + _CAPABILITIES
# The answer: its size, the version (major, minor, patch), padding, capabilities.
_ANSWER = 4 + len(_CAPABILITIES)
# From ggml-rpc.h: servers of another major version or a newer minor version are incompatible.
_VERSION = (7, 0)


def parse_servers(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the distinct servers in texts such as "10.0.0.2:50052,10.0.0.3:50052"."""
    texts = [given] if isinstance(given, str) else given or ()
    return tuple(
        dict.fromkeys(_checked(item.strip()) for text in texts for item in text.split(","))
    )


def _checked(server: str) -> str:
    host, _, port = server.partition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 2**16:
        raise SettingsError(
            f"{server!r} is not a server: give host:port (--rpc 192.168.0.2:{DEFAULT_PORT}), where "
            "host is a name or an IPv4 address"
        )
    return server


def check_server(server: str) -> None:
    """Check that a compatible server answers."""
    host, _, port = server.partition(":")
    start = f"start `pyh2o rpc-server --port {port}` on {host}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        try:
            connection.connect((host, int(port)))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ServerError(
                f"no RPC server can be reached at {server} ({reason}): {start}, and check the "
                "address and firewalls"
            ) from None
        try:
            connection.sendall(_GREETING)
            answer = connection.makefile("rb").read(8 + _ANSWER)
        except TimeoutError:
            raise ServerError(
                f"the RPC server on {server} is busy with another program: it serves one at a "
                "time; end that one, or start another server on another port"
            ) from None
        except OSError:
            answer = b""
    size, version = int.from_bytes(answer[:8], "little"), tuple(answer[8:10])
    if size != _ANSWER or version[:1] != _VERSION[:1] or version > _VERSION:
        raise ServerError(
            f"the program on {server} is not an RPC server of this version: {start}, with the same "
            "version of pyh2o"
        )


class Offloading:
    """The servers' devices and local GPUs that one model is distributed over.

    Other models of the process do not use these servers.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self._servers = servers
        self._devices = [device for server in servers for device in _devices_behind(server)]
        self._devices += backends.local_devices()
        n_most = int(llama_cpp.llama_max_devices())
        if len(self._devices) > n_most:
            raise SettingsError(
                f"llama.cpp supports at most {n_most} devices, and the GPUs and servers have "
                f"{len(self._devices)}: give fewer servers (--rpc)"
            )
        # llama.cpp reads them while the model loads
        n = len(self._devices)
        self._addresses = (ctypes.c_void_p * (n + 1))(*(each.address for each in self._devices))
        # llama.cpp would print a stack trace before it aborts
        _set_abort_callback(_BEFORE_ABORT)

    def hand_to(self, params: Any) -> None:
        params.devices = ctypes.addressof(self._addresses)

    def hold(self) -> None:
        """Record that a loaded model is connected to the servers."""
        _HELD.add(self)

    def holds(self, server: str) -> bool:
        return server in self._servers

    def release(self) -> None:
        """Record that the model and its connections are closed."""
        _HELD.discard(self)


# Of loaded models. A server serves one program at a time, but all models of it.
_HELD: weakref.WeakSet[Offloading] = weakref.WeakSet()


def _devices_behind(server: str) -> list[Device]:
    add_server = backends.backend_function(
        "RPC", "ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p
    )
    if add_server is None:
        raise ServerError(
            "this build of pyh2o has no RPC backend, so layers cannot be on other machines: "
            "install it again without -DGGML_RPC=OFF"
        )
    if not any(each.holds(server) for each in _HELD):
        check_server(server)
    registry = add_server(server.encode())
    if registry is None:
        raise ServerError(f"the RPC server on {server} offers no device: start it with one")
    return backends.devices_of(registry)


_LOST = (
    "the connection to an RPC server is lost, and llama.cpp ends this program: start the server "
    "again, and resume what was saved"
)
_ABOUT_SERVERS = ("Remote RPC server", "Failed to connect to", "RPC handshake failed")

_report: Callable[[str], None] | None = None


def report_loss(report: Callable[[str], None]) -> None:
    """Call `report` with a line about a lost server before llama.cpp ends the process.

    It is called in another thread. After it returns, llama.cpp ends the process with SIGABRT.
    """
    global _report
    _report = report


def _before_abort(message: bytes) -> None:
    text = message.decode(errors="replace")
    is_lost = any(part in text for part in _ABOUT_SERVERS)
    with contextlib.suppress(Exception):  # an exception must not pass through llama.cpp
        if is_lost and _report is not None:
            _report(_LOST)
        else:
            print(f"pyh2o: {_LOST}" if is_lost else text, file=sys.stderr, flush=True)


_set_abort_callback = backends.ggml_function(
    "ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p
)
_BEFORE_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_before_abort)
