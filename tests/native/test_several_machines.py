"""Layers on servers of ggml's RPC backend, here other processes of this machine."""

from __future__ import annotations

import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from many_texts import at_once, llama_in, tiny_engine
from pyh2o import Llama
from pyh2o.cache.native import device_bytes
from pyh2o.errors import ServerError
from rpc_servers import RPCServer, needs_rpc, rpc_server, unused_address
from tiny_llama import EXACT_ROWS, assert_same_cache, tiny_llama

MODEL: dict[str, Any] = {"seed": 3, "n_layer": 4, "n_ctx_train": 512}

pytestmark = needs_rpc

CHUNK = 7
N_TOKENS = 24 * CHUNK
SETTINGS: dict[str, Any] = {
    "hh": 12,
    "recent": 9,
    "slack": CHUNK,
    "attention": "ops",
    "logits_all": True,
    **EXACT_ROWS,
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with rpc_server() as address:
        yield address


def random_tokens(n: int = N_TOKENS) -> list[int]:
    return np.random.default_rng(6).integers(0, 384, n).tolist()


def read(llm: Llama, tokens: list[int]) -> None:
    for start in range(0, len(tokens), CHUNK):
        llm.eval(tokens[start : start + CHUNK])


def test_a_state_moves_between_machines(path: Path, server: str) -> None:
    """A state saved with rows on a server is loaded with local rows, and vice versa."""
    there, here = tiny_llama(path, rpc_servers=server, **SETTINGS), tiny_llama(path, **SETTINGS)
    tokens, more = random_tokens(), random_tokens(30)
    read(there, tokens)
    state = there.kv_state()
    for llm in (here, there):
        llm.load_kv_state(state, tokens)
        assert llm.kv_state() == state
        read(llm, more)
    n = len(tokens) + len(more)
    np.testing.assert_array_equal(there.scores[len(tokens) : n], here.scores[len(tokens) : n])
    assert there.kv.compactions == here.kv.compactions > 10
    assert_same_cache(there, here)
    there.close()
    here.close()


def test_several_texts_run_with_rows_on_a_server(path: Path, server: str) -> None:
    texts = [random_tokens()[i : i + 90] for i in (0, 40)]
    here = tiny_llama(path, **SETTINGS)
    with tiny_engine(path, texts=2, rpc_servers=server, **SETTINGS) as engine:

        def rows_and_last_logits(tokens: list[int]) -> tuple[Any, ...]:
            with llama_in(engine) as llm:
                read(llm, tokens)
                assert device_bytes(llm.text.model.address) > 0
                rows = [llm.kv_rows(layer)[0] for layer in range(llm.text.n_layer)]
                return rows, llm.scores[llm.n_tokens - 1].copy()

        found = at_once([partial(rows_and_last_logits, tokens) for tokens in texts])
    for tokens, (rows, logits) in zip(texts, found, strict=True):
        here.reset()
        read(here, tokens)
        for layer, positions in enumerate(rows):
            np.testing.assert_array_equal(positions, here.kv_rows(layer)[0])
        np.testing.assert_allclose(logits, here.scores[here.n_tokens - 1], atol=1e-3)
    here.close()


def test_other_models_of_the_process_stay_local(path: Path, server: str) -> None:
    with tiny_llama(path, rpc_servers=server, hh=8, recent=8) as there:
        with tiny_llama(path, rpc_servers=server, hh=8, recent=8) as second:
            second.eval([1, 2, 3])  # the same connection
        with tiny_llama(path, hh=8, recent=8) as here:
            here.eval([1, 2, 3])
            assert device_bytes(here.text.model.address) == 0
        there.eval([1, 2, 3])
        assert device_bytes(there.text.model.address) > 0
        again = pickle.loads(pickle.dumps(there))
        assert again.text.model.weights.rpc_servers == (server,)
        again.close()


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, (3, 1, 0)),
        ({"n_gpu_layers": 4, "tensor_split": [1.0, 9.0]}, (1, 2, 1)),
        ({"n_gpu_layers": 0}, (0, 0, 4)),
    ],
)
def test_layers_are_distributed(
    path: Path,
    server: str,
    capfd: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    counts: tuple[int, ...],
) -> None:
    """Return the device of each layer from llama.cpp's log."""
    with rpc_server() as other:
        llm = tiny_llama(
            path, rpc_servers=f"{server},{other}", hh=8, recent=8, verbose=True, **settings
        )
        llm.eval([1, 2, 3])
        llm.close()
    log = capfd.readouterr().err
    devices = re.findall(r"layer +[0-3] assigned to device (\w+)", log)
    *on_servers, here = counts
    names = sorted({name for name in devices if name != "CPU"})
    assert [devices.count(name) for name in names] == [n for n in on_servers if n]
    assert devices.count("CPU") == here


def test_an_unreachable_server_is_reported(path: Path) -> None:
    address = unused_address()
    with pytest.raises(ServerError, match=f"no RPC server can be reached at {address}"):
        tiny_llama(path, rpc_servers=address)


def test_a_busy_server_is_refused_immediately(
    path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program uses it."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"loaded\n"
    monkeypatch.setattr("pyh2o.library.rpc.PATIENCE", 0.5)
    with pytest.raises(ServerError, match="busy with another program"):
        tiny_llama(path, rpc_servers=server)
    monkeypatch.undo()
    holder.communicate()
    assert holder.returncode == 0
    tiny_llama(path, rpc_servers=server, hh=8, recent=8).close()


HOLDER = """
import sys
from pyh2o import Llama
path, server = sys.argv[1:]
with Llama(path, rpc_servers=server, hh=8, recent=8, n_threads=1) as llm:
    llm.eval([1, 2, 3])
    print("loaded", flush=True)
    sys.stdin.read()
    llm.eval([4, 5, 6])
"""


def test_the_loss_of_a_server_ends_the_process_with_one_line(path: Path) -> None:
    """llama.cpp aborts, which cannot be caught; printing the line is all that is possible."""
    server = RPCServer()
    client = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), server.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"loaded\n"
    server.kill()
    _, notes = client.communicate()
    assert client.returncode == -signal.SIGABRT
    (line,) = notes.decode().splitlines()
    assert line.startswith("pyh2o: the connection to an RPC server is lost")


@pytest.mark.parametrize("n_gpu_layers", [-1, 2])
def test_a_failed_model_load_releases_the_server(
    tmp_path: Path, path: Path, server: str, n_gpu_layers: int
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xy"))
    with pytest.raises(ValueError, match="cannot load"):
        tiny_llama(broken, rpc_servers=server, n_gpu_layers=n_gpu_layers)
    tiny_llama(path, rpc_servers=server, hh=8, recent=8).close()
