"""`pyh2o rpc-server`, and `--rpc` of the commands that it computes for: the real program."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from cli_fakes import ENDLESS, PATIENCE, run, run_program, start_program
from rpc_servers import RPCServer, needs_rpc, rpc_server, unused_address
from tiny_gguf import write_tiny_gguf

pytestmark = [needs_rpc, pytest.mark.usefixtures("surroundings")]

real = pytest.mark.real


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=5, n_ctx_train=512)


@real
def test_a_server_listens_on_loopback_until_ctrl_c() -> None:
    server = RPCServer()
    host, port = server.address.split(":")
    assert host == "127.0.0.1"
    assert "other machines" not in server.notes
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.2", int(port))) != 0
    taken = run_program("rpc-server", "--port", port)
    assert taken.code == 1
    assert taken.notes.startswith(f"error: cannot listen on 127.0.0.1 port {port}: Address already")

    server.process.send_signal(signal.SIGINT)
    assert server.end() == (0, "stopped\n")


@real
def test_a_server_warns_when_it_lets_others_in() -> None:
    server = RPCServer("--host", "0.0.0.0")
    assert server.notes.startswith("other machines can reach this server, which has no encryption")
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (0, "stopped\n")


@real
def test_text_with_layers_on_two_servers(path: Path) -> None:
    story = ["generate", "--model", path, "-p", "a", "-n", "80", "--hh", "8", "--recent", "8"]
    story += [*ENDLESS, "--ignore-eos"]
    with rpc_server() as one, rpc_server() as other:
        alone = run_program(*story, "--rpc", one)
        spread = run_program(*story, "--rpc", one, "--rpc", other)
        assert spread.code == alone.code == 0, spread.notes
        assert spread.text == alone.text != ""
        some = run_program(*story, "--rpc", f"{one},{other}", "--gpu-layers", "2")
        assert (some.code, some.text) == (0, alone.text)


@real
def test_a_server_that_ends_at_ctrl_c_is_told_in_one_line(path: Path) -> None:
    server = RPCServer()
    program = start_program(
        "generate", "--model", path, "-p", "a", *ENDLESS, "--ignore-eos", "--no-loop-guard",
        "-n", "0", "--rpc", server.address,
    )  # fmt: skip
    assert program.stdout is not None
    assert len(program.stdout.read(100)) == 100
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (0, "stopped\n")
    _, notes = program.communicate(timeout=PATIENCE)
    assert program.returncode == 1
    assert (
        notes.decode().splitlines()[-1].startswith("error: the connection to an RPC server is lost")
    )
    assert "Traceback" not in notes.decode()


@pytest.mark.parametrize("command", ["chat", "generate", "serve"])
def test_nobody_listens(path: Path, command: str) -> None:
    address = unused_address()
    more = {"generate": ["-p", "a"], "serve": ["--port", "0"], "chat": []}[command]
    output = run(command, "--model", str(path), *more, "--rpc", address)
    assert output.code == 1
    (line,) = output.notes.splitlines()
    assert line.startswith(f"error: no RPC server can be reached at {address}")


def test_processes_do_not_share_a_server(path: Path) -> None:
    output = run("bench", "--model", str(path), "--rpc", "127.0.0.1:50052")
    assert output.code == 1
    assert output.notes.startswith("error: --rpc is not supported: each cache runs in its own")
