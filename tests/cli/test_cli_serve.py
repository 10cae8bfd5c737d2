"""`pyh2o serve`: the real program, with OpenAI's own client."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from needed import needed
from pyh2o import Llama
from pyh2o.cli.app import app
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import EXACT_ROWS, ONE_THREAD

openai = needed("openai")
loopback = needed("loopback", name="the server's packages")
serving = needed("serving_program", name="the server's packages")
PATIENCE, get, wait_until = loopback.PATIENCE, loopback.get, loopback.wait_until
OUTSIDE, Program = serving.OUTSIDE, serving.Program

WINDOW = 256
EOS = 2
MESSAGES: Any = [{"role": "user", "content": "Hello?"}]

real = pytest.mark.real


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        seed=5,
        n_ctx_train=1024,
        chat_template=CHAT_TEMPLATE,
    )


def new_client(address: str, api_key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key=api_key, max_retries=0, timeout=PATIENCE)


def chat(client: openai.OpenAI, **arguments: Any) -> Any:
    arguments = {
        "messages": MESSAGES,
        "max_tokens": 20,
        "logit_bias": {str(EOS): -100},
        **arguments,
    }
    return client.chat.completions.create(model="tiny", **arguments)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.fixture
def program(path: Path, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*arguments: str | Path) -> Program:
        started.append(Program("--model", path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(PATIENCE)


@real
def test_serve_talks_to_openai_s_client(program: Callable[..., Program]) -> None:
    budget = ("--ctx", WINDOW, "--hh", "32", "--recent", "32")
    server = program("--port", "0", *budget, "--texts", "2", "--store-mib", "8")
    address = server.address()
    client = new_client(address)
    assert server.notes.startswith(
        "tiny · 2 texts at once, each: KV 0/256 cells · budget 56 (24 heavy + 32 recent)"
    )
    assert [model.id for model in client.models.list()] == ["tiny"]
    chunks = list(chat(client, stream=True, seed=1, max_tokens=300))
    assert text_of(chunks) == chat(client, seed=1, max_tokens=300).choices[0].message.content
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    assert server.notes.splitlines()[1:] == [
        f"listening on {address} · page at {address.removesuffix('v1')} · Ctrl-C stops",
        "stopped",
    ]


@real
def test_served_answers_see_what_is_found(program: Callable[..., Program], path: Path) -> None:
    messages: Any = [
        {"role": "user", "content": "a ship called sage " + "and waves and wind " * 40},
        {"role": "assistant", "content": "so it was " * 20},
        {"role": "user", "content": "what was the ship called"},
    ]
    budget = ("--ctx", 512, "--hh", "40", "--recent", "40", "--slack", "24")
    server = program("--port", "0", *budget, "--recall", "48", "--kv-type", "f32")
    answer = chat(new_client(server.address()), messages=messages, temperature=0)
    answers = []
    for recall in (48, 0):
        settings = {**EXACT_ROWS, **ONE_THREAD, "n_ctx": 512, "hh": 40, "recent": 40, "slack": 24}
        with Llama(str(path), recall=recall, **settings) as llm:
            given = {"temperature": 0.0, "max_tokens": 20, "repeat_penalty": 1.1}
            answers.append(llm.create_chat_completion(messages, logit_bias={EOS: -100.0}, **given))
            assert (llm.kv.found_share > 0) == (recall > 0)
    contents = [each["choices"][0]["message"]["content"] for each in answers]
    assert answer.choices[0].message.content == contents[0] != contents[1]
    assert answer.usage.total_tokens == answers[0]["usage"]["total_tokens"]


@real
@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_does_not_wait_for_an_answer(program: Callable[..., Program], stream: bool) -> None:
    server = program("--port", "0")
    client = new_client(server.address())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: list(chat(client, max_tokens=10**8, stream=stream)))
        wait_until_busy(client)
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        if not stream:
            with pytest.raises(openai.APIError):
                answer.result(PATIENCE)
    assert "Traceback" not in server.notes


@real
def test_as_many_texts_as_are_asked_for(program: Callable[..., Program]) -> None:
    """Two are answered and the third waits; Ctrl-C ends all of them."""
    server = program("--port", "0", "--texts", "2")
    client = new_client(server.address())
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(chat, client, max_tokens=10**8) for _ in range(3)]
        wait_until_busy(client, 2)
        wait_until(lambda: 'pyh2o_requests_waiting{model="tiny"} 1.0\n' in metrics(client))
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        for answer in answers:
            with pytest.raises(openai.APIError):
                answer.result(PATIENCE)
    assert "Traceback" not in server.notes


@real
def test_texts_that_are_no_count(program: Callable[..., Program]) -> None:
    server = program("--port", "0", "--texts", "1000")
    assert server.end() == 1
    assert server.notes == "error: 1000 texts at once: give a count from 1 to 256\n"


@real
def test_a_second_ctrl_c_ends_it_as_quietly(program: Callable[..., Program]) -> None:
    server = program("--port", "0")
    client = new_client(server.address())
    assert client.models.list()
    for _ in range(2):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.02)  # two at once would be one
    assert server.end() == 0
    assert server.notes.endswith("Ctrl-C stops\nstopped\n")


def wait_until_busy(client: openai.OpenAI, n: int = 1) -> None:
    """Wait until the model answers so many at the same time."""
    wait_until(lambda: f'pyh2o_requests_running{{model="tiny"}} {n}.0\n' in metrics(client))


def metrics(client: openai.OpenAI) -> str:
    assert client.base_url.port is not None
    return str(get(client.base_url.port, "/metrics").body.decode())


@real
def test_a_port_that_is_taken(program: Callable[..., Program]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = program("--port", str(port))
        assert server.end() == 1
    assert server.notes == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "give another --host or --port\n"
    )


@real
@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "secret"], False),
        (["--host", "localhost"], False),
    ],
)
def test_strangers_are_warned_of(
    program: Callable[..., Program], arguments: list[str], warned: bool
) -> None:
    server = program("--port", "0", *arguments)
    server.address()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    assert ("other machines can reach this without a key" in server.notes) == warned


def test_help_leaves_the_sampling_to_requests() -> None:
    done = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    options = [
        "host",
        "port",
        "api-key",
        "max-wait",
        "texts",
        "store-mib",
        "model",
        "hh",
        "kv-type",
    ]
    assert [option for option in options if f"--{option} " not in done.output] == []
    assert "--temp " not in done.output


@real
@pytest.mark.parametrize("command", [["serve"], ["chat", "--web"]], ids=str)
def test_missing_packages_are_named(command: list[str]) -> None:
    program = "import sys; sys.modules['fastapi'] = None; from pyh2o.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        cwd=OUTSIDE,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: the server needs the package fastapi: pip install 'pyh2o-llm[server]'\n"
    )
