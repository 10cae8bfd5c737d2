"""Models for the tests of text completion."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp
import pytest

from completions import QUIET, SMALL_WINDOW, TRAINED_CONTEXT, WINDOW
from pyh2o import Llama
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(
        write_tiny_gguf(path, seed=1, n_ctx_train=TRAINED_CONTEXT, chat_template=CHAT_TEMPLATE)
    )


@pytest.fixture(scope="module")
def stock(model_path: str) -> Iterator[llama_cpp.Llama]:
    model = llama_cpp.Llama(model_path, n_ctx=WINDOW, logits_all=True, **QUIET)
    yield model
    model.close()


@pytest.fixture(scope="module")
def full(model_path: str) -> Iterator[Llama]:
    """Eviction turned off."""
    model = Llama(model_path, n_ctx=WINDOW, evict=False, logits_all=True, **QUIET)
    yield model
    model.close()


@pytest.fixture(scope="module")
def roomy(model_path: str) -> Iterator[Llama]:
    """Evicts, but from texts longer than the window only, and with llama.cpp's own rounding."""
    settings = {"n_ctx": WINDOW, "hh": 0.5, "recent": 0.5, "attention": "ops"}
    model = Llama(model_path, logits_all=True, **settings, **QUIET)
    yield model
    model.close()


@pytest.fixture(params=["full", "roomy"])
def ours(request: pytest.FixtureRequest) -> Llama:
    model: Llama = request.getfixturevalue(request.param)
    return model


@pytest.fixture
def evicting(model_path: str) -> Iterator[Llama]:
    model = Llama(model_path, n_ctx=SMALL_WINDOW, hh=0.25, recent=0.25, **QUIET)
    yield model
    model.close()


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """Its positions are learned, so that texts end with those it was trained on."""
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("ending") / "tiny.gguf",
        seed=1,
        n_ctx_train=TRAINED_CONTEXT,
        arch_variant="learned_positions",
    )
    model = Llama(str(path), n_ctx=SMALL_WINDOW, hh=0.25, recent=0.25, **QUIET)
    yield model
    model.close()
