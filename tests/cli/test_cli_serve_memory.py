"""The memory of `pyh2o serve`: what the thread of one request has freed is there for the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from needed import needed
from tiny_gguf import write_tiny_gguf

serving = needed("serving_program", name="the server's packages")

N_THREADS = 6
# Counts the parts of malloc's memory once the model is loaded and some threads have taken some.
COUNTING = f"""
import ctypes, sys, threading
from pyh2o.cli.app import main
from pyh2o import server

def count(_app, _listener, **_settings):
    all_there = threading.Barrier({N_THREADS})
    def take():
        taken = bytearray(100_000)
        all_there.wait()
    threads = [threading.Thread(target=take) for _ in range({N_THREADS})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    out = ctypes.c_void_p(libc.fdopen(1, b"w"))
    libc.malloc_info(0, out)
    libc.fflush(out)

server.run = count
main()
"""

# Ends the server once it gives memory back.
GIVING_BACK = """
import os, signal
from pyh2o.cli.app import main
from pyh2o.server import app

def give_back():
    print("given back", flush=True)
    os.kill(os.getpid(), signal.SIGINT)

app.SECONDS_TO_GIVE_BACK = 0
app.give_back_freed_memory = give_back
main()
"""


def n_parts(model: Path, **variables: str) -> int:
    """In how many parts malloc has its memory when the server begins to answer."""
    environment = {key: os.environ[key] for key in os.environ if key != "MALLOC_ARENA_MAX"}
    return said(COUNTING, model, {**environment, **variables}).count("<heap nr=")


def said(program: str, model: Path, environment: dict[str, str]) -> str:
    """What a program prints that is called as `pyh2o serve` is."""
    return subprocess.run(
        [sys.executable, "-c", program, "serve", "--model", str(model), "--port", "0"],
        env={**environment, "PYH2O_THREADS": "1"},
        cwd=serving.OUTSIDE,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


@pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another malloc than that of glibc"
)
def test_threads_share_the_memory_that_was_freed(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, n_ctx_train=1024)
    assert n_parts(model) == 1
    assert n_parts(model, MALLOC_ARENA_MAX="3") == 3


def test_memory_is_given_back_again_and_again(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, n_ctx_train=1024)
    assert said(GIVING_BACK, model, dict(os.environ)).startswith("given back")
