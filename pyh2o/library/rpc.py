"""Layers on other machines: servers of ggml's RPC backend, seen from the model's side.

llama.cpp ends the process if it cannot reach a server, or if what answers is none. So a server is
asked first whether it is there, in its own words, and with patience that has an end.
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
"""Seconds that a server may take to answer a greeting."""

ALL_LAYERS = -1

# RPC_CMD_HELLO, the size of what follows, and the abilities of the connection: none but TCP.
_CAPABILITIES = bytes(24)
_GREETING = bytes([14]) + len(_CAPABILITIES).to_bytes(8, "little") + _CAPABILITIES
# Its answer: the size, the version (major, minor, patch), a byte for nothing, abilities.
_ANSWER = 4 + len(_CAPABILITIES)
# Of ggml-rpc.h: servers of another major version, or of a newer minor one, do not fit.
_VERSION = (7, 0)


def parse_servers(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """The servers in texts such as "10.0.0.2:50052,10.0.0.3:50052", each once.

    Raises:
        SettingsError: one is no host:port.
    """
    texts = [given] if isinstance(given, str) else given or ()
    return tuple(
        dict.fromkeys(_checked(item.strip()) for text in texts for item in text.split(","))
    )


def _checked(server: str) -> str:
    host, _, port = server.partition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 2**16:
        raise SettingsError(
            f"{server!r} is no server: give host:port (--rpc 192.168.0.2:{DEFAULT_PORT}), where "
            "host is a name or an IPv4 address"
        )
    return server


def check_server(server: str) -> None:
    """Greet a server, so that llama.cpp will not have to find out that nobody answers.

    Raises:
        ServerError: there is none, it does not answer, is busy, or is of another version.
    """
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
            f"what listens on {server} is no RPC server of the version that this build talks to: "
            f"{start}, of the same version of pyh2o"
        )


class Offloading:
    """The devices that one model is spread over beside the CPU: those of servers, and the GPUs.

    They are handed to llama.cpp for this model alone: other models of the process do not see the
    servers.

    Args:
        servers: host:port of each, one at least.

    Raises:
        ServerError: a server cannot be used, or the build has no RPC.
        SettingsError: they are more devices than llama.cpp takes.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self._servers = servers
        self._devices = [device for server in servers for device in _devices_behind(server)]
        self._devices += backends.local_devices()
        n_most = int(llama_cpp.llama_max_devices())
        if len(self._devices) > n_most:
            raise SettingsError(
                f"{len(self._devices)} devices (GPUs and servers) are more than the {n_most} that "
                "llama.cpp spreads a model over: give fewer servers (--rpc)"
            )
        # llama.cpp reads them while the model loads
        n = len(self._devices)
        self._addresses = (ctypes.c_void_p * (n + 1))(*(each.address for each in self._devices))
        # one line is said where llama.cpp would print a trace of its functions, and then aborts
        _set_abort_callback(_BEFORE_ABORT)

    def hand_to(self, params: Any) -> None:
        """Let a model that is loaded with these parameters use the devices."""
        params.devices = ctypes.addressof(self._addresses)

    def hold(self) -> None:
        """The model is loaded, and has connections to the servers."""
        _HELD.add(self)

    def holds(self, server: str) -> bool:
        """Whether a server is one of these."""
        return server in self._servers

    def release(self) -> None:
        """The model is gone, and with it its connections."""
        _HELD.discard(self)


# Of models that are loaded. A server talks to one program at a time, but to all its models.
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


# -------------------------------------------------------------------------------------------------
# A server that is lost
# -------------------------------------------------------------------------------------------------

_LOST = (
    "an RPC server has ended, or the connection to it: llama.cpp cannot go on without it, so this "
    "program ends; start the server again, and go on from what was saved"
)
_ABOUT_SERVERS = ("Remote RPC server", "Failed to connect to", "RPC handshake failed")

_report: Callable[[str], None] | None = None


def report_loss(report: Callable[[str], None]) -> None:
    """Hand the line about a lost server to this function, which may end the process better.

    It is called in another thread. When it returns, llama.cpp ends the process with SIGABRT;
    nothing can stop that.
    """
    global _report
    _report = report


def _before_abort(message: bytes) -> None:
    text = message.decode(errors="replace")
    is_lost = any(part in text for part in _ABOUT_SERVERS)
    with contextlib.suppress(Exception):  # nothing can be raised into llama.cpp
        if is_lost and _report is not None:
            _report(_LOST)
        else:
            print(f"pyh2o: {_LOST}" if is_lost else text, file=sys.stderr, flush=True)


_set_abort_callback = backends.ggml_function(
    "ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p
)
_BEFORE_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_before_abort)
