"""Serving this machine's devices to others with ggml's RPC backend."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from ..errors import ServerError
from ..limits import LOOK_SECONDS
from . import backends
from .backends import Device


def free_address(host: str, port: int) -> tuple[str, int]:
    """Return the IPv4 address and the port to listen on; a free port for 0."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            address, port = probe.getsockname()
            return address, port
    except OSError as error:
        no_name = isinstance(error, socket.gaierror)
        reason = error.strerror if no_name else os.strerror(error.errno or 0)
        raise ServerError(
            f"cannot listen on {host} port {port}: {reason}; give another --host or --port"
        ) from None


def lets_others_in(address: str) -> bool:
    return not ipaddress.ip_address(address).is_loopback


def offered_devices() -> list[Device]:
    """Return the devices to serve: the GPUs, or else the CPU."""
    return backends.local_devices() or [backends.cpu()]


def run(
    address: str,
    port: int,
    threads: int,
    *,
    on_ready: Callable[[], None],
    on_end: Callable[[], None],
) -> None:
    """Serve one program at a time until Ctrl-C, which ends the process with exit code 0.

    Must be called in the main thread of a process that does nothing else. `on_ready` is called
    when the server listens, `on_end` at Ctrl-C.
    """
    start = backends.backend_function(
        "RPC",
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    )
    if start is None:
        raise ServerError(
            "this build of pyh2o has no RPC backend, so it cannot compute for other machines: "
            "install it again without -DGGML_RPC=OFF"
        )
    devices = offered_devices()
    addresses = (ctypes.c_void_p * len(devices))(*(device.address for device in devices))
    arguments = (f"{address}:{port}".encode(), None, threads, len(devices), addresses)
    # in another thread: Python runs no signal handler while the main thread is in C
    server = threading.Thread(target=start, args=arguments, daemon=True)
    ended = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    server.start()
    while server.is_alive() and not _listens(address, port):
        time.sleep(LOOK_SECONDS)
    if server.is_alive():
        on_ready()
    while server.is_alive():
        if ended.wait(LOOK_SECONDS):
            on_end()
            os._exit(0)  # the server never returns
    raise ServerError(
        f"the RPC server cannot listen on {address} port {port}: give another --host or --port"
    )


def _listens(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex((address, port)) == 0
