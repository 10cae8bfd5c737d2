"""Fixtures for tests of the page: a browser, and a server with a tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import browser as browsers
from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from pyh2o.limits import Limits
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 56, "recent": 32, "slack": 16, "recall": 24}


@pytest.fixture(scope="module")  # while it runs, other tests cannot run an event loop
def chromium() -> Iterator[Any]:
    with browsers.browser() as running:
        yield running


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(
        folder / "tiny.gguf", seed=5, n_ctx_train=1 << 16, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=2, **CACHE) as running:
        yield running


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary folder for chats, and the same seeds in each run."""
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))
    seeds = count(1)
    monkeypatch.setattr("secrets.randbelow", lambda n: next(seeds) % n)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable end tokens and loop detection: a model with random weights would stop early.

    Each token takes a few milliseconds, so that a browser on the same core can show it.
    """

    def wait(*_: Any) -> None:
        time.sleep(0.003)

    monkeypatch.setattr("pyh2o.writing.repetition.EndlessText.add", wait)
    monkeypatch.setattr("pyh2o.writing.repetition.RepetitionGuard.add", wait)
    monkeypatch.setattr("pyh2o.core.model.Model.is_end", lambda _model, _token: False)


@pytest.fixture
def reading_seen(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Slow down prefill, so that a busy browser can show its progress, until the event is set."""
    answers = needed("pyh2o.server.session_answers", name="the server's packages")
    on_read, is_seen = answers.Answering._on_read, threading.Event()

    def read_slowly(answering: Any, done: int, of_all: int) -> None:
        is_seen.wait(0.01)
        on_read(answering, done, of_all)

    monkeypatch.setattr(answers.Answering, "_on_read", read_slowly)
    return is_seen


@pytest.fixture
def serve(chats: None, engine: Engine) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a server and returns its client."""
    clients = needed("session_client", name="the server's packages")
    with ExitStack() as running:

        def start(served: Any = engine, **settings: Any) -> Any:
            if served is engine:
                settings["limits"] = Limits(prompt_tokens=10**6)
            return running.enter_context(clients.serving(served, **settings))

        yield start


@pytest.fixture
def client(serve: Callable[..., Any], endless: None) -> Any:
    return serve()


@pytest.fixture
def tab(chromium: Any, client: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the page as a new user. Its errors are checked at the end."""
    with browsers.tabs(chromium, client.server.address) as open_tab:
        yield open_tab
