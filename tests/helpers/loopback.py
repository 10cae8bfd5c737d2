"""A server in a thread of this process, and a minimal client."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import uvicorn

from good_bodies import CHAT, COMPLETIONS, GOOD
from needed import needed
from pyh2o.engine import Engine
from pyh2o.server import Limits, ModelSource, ServedModel, ServedModels, create_app
from pyh2o.server.app import server_config
from pyh2o.sessions.identity import model_identity

PATIENCE = 120
"""Seconds after which a test gives up: far more than is needed even on a busy machine."""

SOON = 20.0
"""A tiny model answers in milliseconds; this is for a busy machine."""

NO_END = {"2": -100}
"""A logit bias: no text ends by itself."""

ENDLESS = {"prompt": "once", "max_tokens": 10**9, "logit_bias": NO_END}


@dataclass(frozen=True)
class Reply:
    """A reply."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """Return the events of a stream."""
        events = self.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event[6:]) for event in events[:-2] if event.startswith("data: ")]


def request_bytes(route: str, body: Any) -> bytes:
    """Return a request as sent; a body of bytes is not encoded."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def ask(
    port: int, method: str, route: str, body: Any = None, timeout: float = PATIENCE, **headers: str
) -> Reply:
    """Send a request and return the reply; a body of bytes is not encoded."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = headers if data is None else {"Content-Type": "application/json", **headers}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
        connection.request(method, route, data, headers)
        response = connection.getresponse()
        return Reply(response.status, response.read())


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def openai_client(address: str, api_key: str = "any") -> Any:
    """Return OpenAI's client of a server, without retries."""
    settings = {"api_key": api_key, "max_retries": 0, "timeout": PATIENCE}
    return needed("openai").OpenAI(base_url=address, **settings)


def only(engine: Engine, limits: Limits | None = None) -> ServedModels:
    """Serve one loaded model."""
    limits = limits or Limits()
    model = ServedModel(engine, "tiny", limits)
    identity = model_identity(engine.model)
    source = ModelSource("tiny", lambda _: model, engine.n_slots, identity=identity)
    models = ServedModels([source], limits)
    models.start(lambda _: None)
    return models


class LoopbackServer:
    """Serves an engine, or several models, on a free port until it is closed."""

    def __init__(
        self, served: Engine | ServedModels, *, limits: Limits | None = None, **settings: Any
    ) -> None:
        self.models = only(served, limits) if isinstance(served, Engine) else served
        self.listener = listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/v1"
        app = self.app = create_app(self.models, **settings)
        # Without a logging configuration, tests see all log messages.
        self._server = uvicorn.Server(server_config(app, log_config=None))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def __enter__(self) -> LoopbackServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def post(self, route: str, body: Any, timeout: float = PATIENCE, **headers: str) -> Reply:
        return ask(self.port, "POST", route, body, timeout, **headers)

    def get(self, route: str, **headers: str) -> Reply:
        return ask(self.port, "GET", route, None, PATIENCE, **headers)

    def headers(self, method: str, route: str, **headers: str) -> Any:
        """Return the headers of a reply."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request(method, route, headers=headers)
            return connection.getresponse().headers

    def send(self, route: str, body: Any) -> socket.socket:
        """Send a request without reading; closing the connection disconnects the client."""
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        connection.sendall(request_bytes(route, body))
        return connection

    def refused(self, route: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Return the error of a refused body."""
        reply = self.post(route, body, SOON)
        assert reply.status == status, reply.body[:500]
        error = reply.error
        assert error["type"] == "invalid_request_error"
        return error

    def answers_well(self) -> None:
        """Check that a valid request is answered."""
        for route in (COMPLETIONS, CHAT):
            reply = self.post(route, GOOD[route], SOON)
            assert reply.status == 200, reply.body[:500]
            assert reply.json["usage"]["completion_tokens"] >= 1

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.app.state.sessions.let_go_idle(0)
