"""A model behind a server, for the tests of requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.engine import Engine
from pyh2o.limits import Limits
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model lies: nothing that clients have to know."""
    return tmp_path_factory.mktemp("secret_folder")


@pytest.fixture(scope="module")
def model_path(folder: Path) -> Path:
    return write_tiny_gguf(
        folder / "tiny.gguf", seed=5, n_ctx_train=1024, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of several models."""
    several = needed("several_models", name="the server's packages")
    written: dict[str, Path] = several.write_models(tmp_path_factory.mktemp("models"))
    return written


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=2, **CACHE) as running:
        yield running


@pytest.fixture(scope="module")
def alone(model_path: Path) -> Iterator[Llama]:
    """The same model with the same cache, that nobody else uses."""
    with tiny_llama(model_path, **CACHE) as model:
        yield model


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Any]:
    loopback = needed("loopback", name="the server's packages")
    with loopback.LoopbackServer(engine, limits=Limits(body_mib=1)) as running:
        yield running


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sessions are saved."""
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))
    return tmp_path / "chats"


@pytest.fixture
def client(chats: Path, engine: Engine) -> Iterator[Any]:
    """Of the sessions of a server."""
    with needed("session_client", name="the server's packages").serving(engine) as running:
        yield running
