"""Clients that leave or wait, and the end: nothing is done for nobody, and texts stay right."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from good_bodies import CHAT, COMPLETIONS
from many_texts import tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.engine import Engine

loopback = needed("loopback", name="the server's packages")
servers = needed("pyh2o.server", name="the server's packages")
wait_until, ENDLESS, NO_END = loopback.wait_until, loopback.ENDLESS, loopback.NO_END

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16}
# Pieces of a prompt are as long as the slack; this is some thousands of them.
LONG_PROMPT = "once upon a time " * 10_000


@pytest.fixture
def engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=1, **CACHE) as running:
        yield running


class Watched:
    """A server, and how far its only text is."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        roomy = servers.Limits(prompt_tokens=10**6, **settings)
        self.server = loopback.LoopbackServer(engine, limits=roomy)
        self.engine = engine
        self.to_read = len(engine.model.tokenize(LONG_PROMPT.encode()))
        assert self.to_read > 100_000

    @property
    def read(self) -> int:
        """Tokens in the only place."""
        return self.engine.report()[0].kv.position

    def wait_until_reading(self) -> None:
        wait_until(lambda: self.engine.n_running == 1 and self.read > 0)

    def wait_until_writing(self) -> None:
        wait_until(lambda: self.engine.usage.sampled > 20)

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.engine.n_running == self.engine.n_waiting == 0)


@pytest.fixture
def watched(engine: Engine) -> Iterator[Watched]:
    made = Watched(engine)
    yield made
    made.server.close()


def check_next_answers(watched: Watched, alone: Llama, rng: np.random.Generator) -> None:
    """What comes next is what a model writes that nobody else uses."""
    for seed in rng.integers(2**31, size=3).tolist():
        given = {"prompt": f"{seed} sheep on the hill", "seed": seed, "max_tokens": 30}
        answer = watched.server.post(COMPLETIONS, {**given, "logit_bias": NO_END}).json
        alone.reset()
        expected = alone.create_completion(
            given["prompt"], seed=seed, max_tokens=30, logit_bias={2: -100.0}
        )
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]


@pytest.mark.parametrize(("route", "stream"), [(COMPLETIONS, False), (CHAT, True)])
def test_a_client_that_leaves_while_its_prompt_is_read(
    watched: Watched, alone: Llama, rng: np.random.Generator, route: str, stream: bool
) -> None:
    messages = [{"role": "user", "content": LONG_PROMPT}]
    body = {"messages": messages} if route == CHAT else {"prompt": LONG_PROMPT}
    connection = watched.server.send(route, {**body, "max_tokens": 5, "stream": stream})
    watched.wait_until_reading()
    connection.close()
    watched.wait_until_idle()
    assert 0 < watched.read < watched.to_read
    check_next_answers(watched, alone, rng)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"stream": True}),
        (COMPLETIONS, {"prompt": ["once", "upon"], "n": 9, "stream": True}),
        ("/completion", {"stream": True}),
    ],
)
def test_a_client_that_leaves_while_it_is_answered(
    watched: Watched, alone: Llama, rng: np.random.Generator, route: str, fields: Any
) -> None:
    connection = watched.server.send(route, {**ENDLESS, **fields})
    watched.wait_until_writing()
    connection.close()
    watched.wait_until_idle()
    check_next_answers(watched, alone, rng)


def test_clients_may_leave_a_stream_at_any_moment(watched: Watched) -> None:
    """Between two events, too: what is sent next must not wait for ever."""
    for n in range(40):
        wanted = watched.engine.usage.sampled + 6 + n
        connection = watched.server.send(COMPLETIONS, {**ENDLESS, "stream": True})
        wait_until(lambda wanted=wanted: watched.engine.usage.sampled > wanted)
        connection.close()
        watched.wait_until_idle()


def test_a_stream_that_nobody_reads_ends(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """When what the system keeps for its client is full."""
    monkeypatch.setattr("pyh2o.server.answers.SEND_SECONDS", 0.5)
    watched.server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", watched.server.port))
        client.sendall(loopback.request_bytes(COMPLETIONS, {**ENDLESS, "stream": True}))
        watched.wait_until_writing()
        watched.wait_until_idle()
    assert watched.server.post(COMPLETIONS, {"prompt": "once", "max_tokens": 3}).status == 200


def test_a_client_that_leaves_the_queue(watched: Watched) -> None:
    at_work = watched.server.send(COMPLETIONS, ENDLESS)
    watched.wait_until_writing()
    waiting = [
        watched.server.send(COMPLETIONS, {"prompt": LONG_PROMPT, "stream": stream})
        for stream in (False, True)
    ]
    wait_until(lambda: watched.engine.n_waiting == 2)
    for connection in waiting:
        connection.close()
    wait_until(lambda: watched.engine.n_waiting == 0)
    assert watched.engine.n_running == 1  # those who left did not wait for it
    at_work.close()
    answer = watched.server.post(COMPLETIONS, {"prompt": "once", "max_tokens": 3})
    assert answer.status == 200
    assert watched.engine.usage.prompt < 100_000  # no prompt of those who left was begun


def test_a_stream_begins_while_its_prompt_is_read(watched: Watched) -> None:
    """So that the client of a long prompt can tell it from a server that hangs."""
    connection = watched.server.send(COMPLETIONS, {"prompt": LONG_PROMPT, "stream": True})
    assert connection.recv(20).startswith(b"HTTP/1.1 200 OK")
    assert watched.engine.n_running == 1
    assert watched.read < watched.to_read
    connection.close()


def test_the_wait_and_the_queue_have_limits(engine: Engine) -> None:
    watched = Watched(engine, wait_seconds=0.3, waiting=1)
    at_work = watched.server.send(COMPLETIONS, ENDLESS)
    watched.wait_until_writing()
    for stream in (False, True):
        reply = watched.server.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        assert reply.status == 503
        assert reply.error["message"].startswith("no slot was free for 0.3 seconds")
    waiting = watched.server.send(COMPLETIONS, ENDLESS)
    wait_until(lambda: engine.n_waiting == 1)
    reply = watched.server.post(COMPLETIONS, {"prompt": "a"})
    assert (reply.status, reply.error["message"]) == (
        503,
        "1 requests are waiting already: try again later",
    )
    for connection in (waiting, at_work):
        connection.close()
    wait_until(lambda: watched.server.models.named("tiny").n_leases == 0)
    assert watched.server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status == 200
    watched.server.close()


@pytest.mark.parametrize("route", [COMPLETIONS, "/v1/sessions"])
def test_a_client_that_leaves_before_its_body_is_whole(
    watched: Watched, caplog: pytest.LogCaptureFixture, route: str
) -> None:
    """That is nothing to write about."""
    request = loopback.request_bytes(route, {"prompt": "once", "max_tokens": 3})
    connection = socket.create_connection(("127.0.0.1", watched.server.port), loopback.PATIENCE)
    connection.sendall(request[:-5])
    # another client is answered, so this one's beginning has been taken
    assert watched.server.get("/health").status == 200
    connection.close()
    answered = watched.server.app.state.answered
    wait_until(lambda: answered.total() == 2 or bool(caplog.records))
    assert watched.server.get("/health").status == 200
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.filterwarnings("error")
def test_ctrl_c_while_the_loop_is_made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the server in order, and no half-made loop complains of it."""
    models = loopback.only(engine, None)
    ended: list[bool] = []
    monkeypatch.setattr(models, "shut_down", lambda: ended.append(True))
    real = time.get_clock_info

    def pressed(name: Any) -> Any:  # asyncio asks for it while it makes a loop
        monkeypatch.setattr(time, "get_clock_info", real)
        signal.raise_signal(signal.SIGINT)
        return real(name)

    monkeypatch.setattr(time, "get_clock_info", pressed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(KeyboardInterrupt):
            servers.run(servers.create_app(models), listener)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ended == [True]


def test_sessions_are_let_go_before_sigterm_ends_the_program(engine: Engine, chats: Path) -> None:
    """Else the files that lock them stay."""
    app = servers.create_app(loopback.only(engine, None))
    there: list[list[str]] = []

    def locks() -> list[str]:
        return [path.name for path in chats.glob(".*.lock")]

    def use_and_end() -> None:
        body = b'{"name": "talk"}'
        asked = Request(address + "/v1/sessions", body, {"Content-Type": "application/json"})
        urlopen(asked).close()
        there.append(locks())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: there.append(locks()))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = Thread(target=use_and_end)
            client.start()
            servers.run(app, listener)
            client.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert there == [[".talk.lock"], []]
