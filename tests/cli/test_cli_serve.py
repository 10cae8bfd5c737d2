"""`pyh2o serve`: the real program with OpenAI's own client, and what it says and refuses."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from cli_fakes import Output, run
from needed import needed
from tiny_gguf import write_tiny_gguf

openai = needed("openai")
loopback = needed("loopback", name="the server's packages")
serving = needed("serving_program", name="the server's packages")
several = needed("several_models", name="the server's packages")
PATIENCE, Program, wait_until = loopback.PATIENCE, serving.Program, loopback.wait_until

MESSAGES: Any = [{"role": "user", "content": "Hello?"}]
BUDGET = ("--ctx", 256, "--hh", "32", "--recent", "32")

pytestmark = pytest.mark.usefixtures("surroundings")
real = pytest.mark.real


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    written: dict[str, Path] = several.write_models(tmp_path_factory.mktemp("models"))
    return written


@pytest.fixture
def server(paths: dict[str, Path]) -> Iterator[Any]:
    options = ("--port", "0", *BUDGET, "--texts", "2", "--store-mib", "8")
    with Program("--model", paths["first"], *options) as running:
        yield running


def chat(client: openai.OpenAI, **arguments: Any) -> Any:
    arguments = {"model": "first", "logit_bias": loopback.NO_END, **arguments}
    return client.chat.completions.create(messages=MESSAGES, **arguments)


@real
def test_serve_talks_to_openai_s_client(server: Any) -> None:
    address = server.address()
    client = loopback.openai_client(address)
    assert server.notes.startswith(
        "first · 2 texts at once, each: KV 0/256 cells · budget 56 (24 heavy + 32 recent)"
    )
    assert [model.id for model in client.models.list()] == ["first"]
    chunks = chat(client, stream=True, seed=1, max_tokens=300)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(client, seed=1, max_tokens=300).choices[0].message.content
    server.stop()
    assert server.notes.splitlines()[1:] == [
        f"listening on {address} · page at {address.removesuffix('v1')} · Ctrl-C stops",
        "stopped",
    ]


@real
def test_ctrl_c_waits_for_no_answer(server: Any) -> None:
    """Two texts are written, one of them as a stream, and the third waits."""
    client = loopback.openai_client(server.address())

    def told(figure: str, n: int) -> bool:
        metrics = loopback.ask(server.port, "GET", "/metrics").body.decode()
        return f'pyh2o_requests_{figure}{{model="first"}} {n}.0\n' in metrics

    with ThreadPoolExecutor(3) as pool:
        streamed = pool.submit(lambda: list(chat(client, max_tokens=10**8, stream=True)))
        wait_until(lambda: told("running", 1))
        answers = [pool.submit(chat, client, max_tokens=10**8) for _ in range(2)]
        wait_until(lambda: told("running", 2) and told("waiting", 1))
        server.stop()
        for answer in answers:
            with pytest.raises(openai.APIError):
                answer.result(PATIENCE)
        streamed.exception(PATIENCE)


@real
def test_a_second_ctrl_c_ends_it_as_quietly(server: Any) -> None:
    assert loopback.openai_client(server.address()).models.list()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.02)  # two at once would be one
    server.stop()
    assert server.notes.endswith("Ctrl-C stops\nstopped\n")


@real
def test_several_models_answer(paths: dict[str, Path]) -> None:
    given = [each for name in ("first", "second", "bert") for each in ("--model", paths[name])]
    with Program(*given, "--port", "0", "--texts", "2", "--ctx", "256") as server:
        client = loopback.openai_client(server.address())
        lines = server.notes.splitlines()
        assert lines[0].startswith("first · 2 texts at once, each: KV 0/256 cells")
        assert lines[1:3] == [
            "second · 2 texts at once, loaded on request",
            "bert · embeddings, loaded on request",
        ]
        for name in ("second", "first"):
            assert chat(client, model=name, max_tokens=5).model == name
        embedded = client.embeddings.create(model="bert", input=["once", "upon a time"])
        assert [len(each.embedding) for each in embedded.data] == [128, 128]
        server.stop()


@real
def test_missing_packages_are_named() -> None:
    program = "import sys; sys.modules['fastapi'] = None; from pyh2o.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve"],
        cwd=serving.OUTSIDE,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: the server needs the package fastapi: {sys.executable} -m pip install "
        "'pyh2o-llm[server]'\n"
    )


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if somebody had pressed Ctrl-C when it listens."""
    monkeypatch.setattr("pyh2o.server.run", lambda *_, **__: None)


def serve(*models: Path, options: tuple[str, ...] = ("--port", "0")) -> Output:
    return run("serve", *(f"--model={path}" for path in models), *options)


def test_an_origin_has_no_path(paths: dict[str, Path]) -> None:
    for wrong in ("http://localhost:3000/", "localhost:3000", "*"):
        output = serve(paths["first"], options=("--port", "0", "--allow-origin", wrong))
        assert output.code == 2
        assert "is not an origin" in output.notes


def test_what_the_application_is_told(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Origins of pages, and what the model was called."""
    told: list[Any] = []

    def note(app: Any, *_: Any, **__: Any) -> None:
        told.append(app.user_middleware[0].kwargs["allow_origins"])
        told.append(app.state.models.sources[0].typed)

    monkeypatch.setattr("pyh2o.server.run", note)
    origins = ["http://localhost:3000", "app://obsidian.md"]
    options = [f"--allow-origin={origin}" for origin in origins]
    assert serve(paths["first"], options=("--port", "0", *options)).code == 0
    assert told == [origins, str(paths["first"])]


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--api-key", "secret"), False),
        (("--host", "localhost"), False),
    ],
)
def test_strangers_are_warned_of(
    paths: dict[str, Path], ends_at_once: None, arguments: tuple[str, ...], warned: bool
) -> None:
    output = serve(paths["first"], options=("--port", "0", *arguments))
    assert output.code == 0
    assert ("other machines can reach this server without a key" in output.notes) == warned


def test_a_model_for_embeddings_alone(paths: dict[str, Path], ends_at_once: None) -> None:
    assert serve(paths["bert"]).notes.startswith(
        "bert · embeddings of 128 values, for texts of up to 128 tokens\n"
    )


def test_a_port_that_is_taken(paths: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        output = serve(paths["first"], options=("--port", str(port)))
    assert output.code == 1
    assert output.notes == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "give another --host or --port\n"
    )


def test_what_is_wrong_is_said_at_once(paths: dict[str, Path], tmp_path: Path) -> None:
    """Also where only a later model is."""
    other = {
        name: tmp_path / f"{name}.gguf" for name in ("none", "broken", "mamba", "unpooled", "first")
    }
    other["broken"].write_bytes(b"GGUF and no more")
    write_tiny_gguf(other["mamba"], seed=1, arch_variant="recurrent")
    write_unpooled(paths["bert"], other["unpooled"])
    other["first"].write_bytes(paths["first"].read_bytes())
    for name, reason in {
        "none": "there is no model file",
        "broken": "its header cannot be read",
        "mamba": "--no-evict keeps the full cache, for all models",
        "unpooled": "file has no pooling type",
        "first": "two models have the name first",
    }.items():
        output = serve(paths["first"], other[name])
        assert output.code == 1
        assert output.notes.startswith("error: ")
        assert reason in output.notes
        assert output.notes.count("\n") == 1
    output = serve(paths["first"], options=("--port", "0", "--texts", "1000"))
    assert (output.code, output.notes) == (
        1,
        "error: texts is 1000: give a count from 1 to 256\n",
    )


def write_unpooled(path: Path, copy: Path) -> None:
    """A copy whose pooling type is NONE."""
    copy.write_bytes(path.read_bytes())
    reader = GGUFReader(copy, "r+")
    field = reader.get_field("bert.pooling_type")
    assert field is not None
    field.parts[field.data[0]][0] = 0
    reader.data.flush()


def test_help_leaves_the_sampling_to_requests() -> None:
    shown = run("serve", "--help-all").text
    options = ("host", "port", "api-key", "max-wait", "texts", "store-mib", "model", "hh")
    assert [option for option in options if f"--{option} " not in shown] == []
    assert "--temp " not in shown
