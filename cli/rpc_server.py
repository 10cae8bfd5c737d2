"""`pyh2o rpc-server`: this machine computes layers of a model that runs on another."""

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
        str, typer.Option(help="IPv4 address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 50052,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="PYH2O_THREADS",
            help="CPU threads.",
            show_default="one for each physical core",
        ),
    ] = None,
) -> None:
    """Compute layers for `--rpc` on another machine: on the GPUs of this one, or else on its CPU.

    One program at a time; others are refused meanwhile. The protocol has neither encryption nor a
    key: whoever reaches the port can read and change what is computed. Ctrl-C stops.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.library import rpc_server as server

    address, port = server.free_address(host, port)
    n_threads = threads or physical_cores()
    devices = ", ".join(device.name for device in server.offered_devices())
    if server.lets_others_in(address):
        terminal.say(
            "other machines can reach this, and it has neither encryption nor a key: let it be "
            "a network that you trust, or leave out --host",
            style="yellow",
        )
    listening = (
        f"listening on {address}:{port} · {devices} · {count(n_threads, 'thread')} · Ctrl-C stops"
    )
    # ggml says there who comes and goes, several times for each program
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    server.run(
        address,
        port,
        n_threads,
        on_ready=lambda: terminal.say(listening),
        on_end=lambda: terminal.say("stopped"),
    )
