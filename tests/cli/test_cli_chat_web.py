"""`pyh2o chat --web`: the real program, with a browser that only records the address."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from cli_fakes import run
from needed import needed
from pyh2o.cli.chat import web
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

loopback = needed("loopback", name="the server's packages")
serving = needed("serving_program", name="the server's packages")
Program, wait_until = serving.Program, loopback.wait_until

pytestmark = pytest.mark.usefixtures("surroundings")
real = pytest.mark.real
CACHE = ("--ctx", "512", "--hh", "60", "--recent", "60", "--slack", "40")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=4, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    """Return the file where the browser records the address."""
    return tmp_path / "opened"


@pytest.fixture
def browser(tmp_path: Path, opened: Path) -> Path:
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" > "{opened}.part"\nmv "{opened}.part" "{opened}"\n')
    script.chmod(0o700)
    return script


@pytest.fixture
def program(browser: Path) -> Iterator[Callable[..., Any]]:
    with ExitStack() as started:
        yield lambda *arguments: started.enter_context(
            Program("--web", *arguments, command="chat", BROWSER=str(browser))
        )


def address_in(opened: Path) -> str:
    """Return the address that the browser was given."""
    wait_until(opened.exists)
    return opened.read_text().strip()


def save_chat(path: Path, name: str) -> None:
    """Save a chat of the terminal."""
    output = run("chat", "-m", str(path), *CACHE, "-n5", "--session", name, stdin="Hello\n")
    assert output.code == 0, output.notes


@real
def test_the_page_is_served_and_opened(
    path: Path, program: Callable[..., Any], opened: Path
) -> None:
    server = program("--model", path, *CACHE)
    port = server.port
    assert server.notes.startswith("tiny · 2 texts at once, each: KV 0/")
    assert address_in(opened) == f"http://127.0.0.1:{port}/"
    page = loopback.ask(port, "GET", "/")
    assert page.status == 200
    assert b"<title>" in page.body
    server.stop()


@real
def test_a_chat_of_the_terminal_is_opened(
    path: Path, program: Callable[..., Any], opened: Path
) -> None:
    """It keeps its model and cache settings."""
    save_chat(path, "my talk")
    server = program("--session", "my talk")
    assert address_in(opened) == f"http://127.0.0.1:{server.port}/#/s/1"
    client = needed("session_client", name="the server's packages").SessionClient(server)
    [session] = client.got("")["data"]
    assert (session["name"], session["usable"], session["turns"]) == ("my talk", True, 1)
    assert client.say("my talk", "And then?", max_tokens=5)["finish"] in ("length", "stop")
    assert len(client.got("/my talk")["turns_list"]) == 2
    server.stop()


def test_the_last_chat_is_opened_and_a_key_is_required(
    path: Path, monkeypatch: pytest.MonkeyPatch, browser: Path, opened: Path
) -> None:
    keys: list[str | None] = []
    monkeypatch.setattr("pyh2o.server.run", lambda app, *_, **__: keys.append(app.state.api_key))
    monkeypatch.setenv("BROWSER", str(browser))
    monkeypatch.setenv("PYH2O_API_KEY", "secret")
    save_chat(path, "x")
    assert run("chat", "--web", "--continue").code == 0
    assert address_in(opened).endswith("/#/s/1")
    assert keys == ["secret"]


def test_a_missing_or_failing_browser_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> Any:
        raise webbrowser.Error("could not locate runnable browser")

    failing, in_terminal = (webbrowser.GenericBrowser(name) for name in ("false", "true"))
    told = "cannot open a browser: the page is http://127.0.0.1:1/\n"
    for found, chosen, said in (
        (none, "", told),
        (lambda: in_terminal, "", told),
        (lambda: failing, "false", told),
        (lambda: in_terminal, "true", ""),  # what the user has chosen
    ):
        monkeypatch.setattr(webbrowser, "get", found)
        monkeypatch.setenv("BROWSER", chosen)
        web._open("http://127.0.0.1:1/")
        assert capsys.readouterr().err == said


def test_the_default_port_is_used_if_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(web, "PORT", port)
        with closing(web._listen()) as listener:
            host, another = listener.getsockname()
            assert host == "127.0.0.1"
            assert another != port
    with closing(web._listen()) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-save"], "--no-save cannot be used with --web: "),
        (["-n5"], "--max-tokens cannot be used with --web: "),
        (["--temp=0"], "--temp cannot be used with --web: "),
        (["-s", "Be brief."], "--system cannot be used with --web: "),
        (["--session=x"], "unknown session x: omit --session, and start a new one on the page"),
        (["-c"], "no conversation is saved in "),
        (["-m", "none.gguf"], "there is no model file none.gguf"),
    ],
    ids=str,
)
def test_options_that_the_page_lacks_are_refused(arguments: list[str], said: str) -> None:
    output = run("chat", "--web", *arguments)
    assert output.code == 1
    assert output.notes.startswith(f"error: {said}")
    assert output.notes.count("\n") == 1


def test_nothing_is_saved_against_the_user_s_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[chat]\nno-save = true\n")
    monkeypatch.setenv("PYH2O_CONFIG", str(file))
    assert run("chat", "--web").notes.startswith("error: --no-save cannot be used with --web")


def test_a_model_without_chats_is_refused(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "bert.gguf", seed=9, n_ctx_train=128, arch_variant="encoder")
    output = run("chat", "--web", "-m", str(model))
    assert output.code == 1
    assert output.notes.splitlines()[-1] == (
        "error: bert is an embedding model: give a model that generates text (--model)"
    )
