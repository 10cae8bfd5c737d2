"""A model behind a server, for the tests of requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from needed import needed
from pyh2o import Llama
from pyh2o.openai.limits import Limits
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model lies: nothing that clients have to know."""
    return tmp_path_factory.mktemp("secret_folder")


@pytest.fixture(scope="module")
def served_llm(folder: Path) -> Iterator[Llama]:
    path = write_tiny_gguf(
        folder / "tiny.gguf", seed=5, n_ctx_train=1024, chat_template=CHAT_TEMPLATE
    )
    with tiny_llama(path, n_ctx=256, hh=32, recent=32, slack=16) as model:
        yield model


@pytest.fixture(scope="module")
def server(served_llm: Llama) -> Iterator[Any]:
    loopback = needed("loopback", name="the server's packages")
    running = loopback.LoopbackServer(served_llm, limits=Limits(body_mib=1))
    yield running
    running.close()
