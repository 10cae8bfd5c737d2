"""Everything that programs do with `llama_cpp.Llama`, done with `pyh2o.Llama`.

With a budget that covers the text all results equal the parent's, if no character takes several
tokens; with longer texts the same calls keep their own promises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import pytest

from drop_in_cases import ROOMY, SMALL, WINDOW
from pyh2o import Llama
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama, tiny_parent


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        seed=3,
        n_ctx_train=1024,
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="module")
def parent(path: Path) -> Iterator[llama_cpp.Llama]:
    with contextlib.closing(tiny_parent(path, n_ctx=WINDOW, logits_all=True)) as model:
        yield model


@pytest.fixture(scope="module")
def roomy(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, logits_all=True, **ROOMY) as model:
        yield model


@pytest.fixture(scope="module")
def small(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, logits_all=True, **SMALL) as model:
        yield model
