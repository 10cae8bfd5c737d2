"""`pyh2o rpc-server`: compute layers of a model for another machine."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from pyh2o.system.threads import physical_cores

from .terminal.terminal import terminal
from .terminal.wording import count


def rpc_server(
    *,
    host: Annotated[
        str, typer.Option(help="IPv4 address to listen on; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free one.")
    ] = 50052,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, envvar="PYH2O_THREADS", help="CPU threads.", show_default="one per physical core"
        ),
    ] = None,
) -> None:
    """Compute layers for `--rpc` on another machine, on the GPUs of this one or its CPU.

    It serves one program at a time and rejects others. The protocol has no encryption and no
    authentication: anyone who can reach the port can read and change the computation. Ctrl-C stops.
    """
    from pyh2o.library import rpc_server as server

    address, port = server.free_address(host, port)
    n_threads = threads or physical_cores()
    devices = ", ".join(device.name for device in server.offered_devices())
    if server.lets_others_in(address):
        terminal.say(
            "other machines can reach this server, which has no encryption and no authentication: "
            "use a trusted network, or remove --host",
            style="yellow",
        )
    listening = (
        f"listening on {address}:{port} · {devices} · {count(n_threads, 'thread')} · Ctrl-C stops"
    )
    # ggml prints several lines there for each connection
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    server.run(
        address,
        port,
        n_threads,
        on_ready=lambda: terminal.say(listening),
        on_end=lambda: terminal.say("stopped"),
    )
