"""Everything that programs do with `llama_cpp.Llama`, done with `pyh2o.Llama`.

First with a budget that covers the text: all results equal the parent's. Then with texts that are
longer than the cache: the same calls work and keep their own promises.

The random model says anything, in any bytes. Where llama_cpp is right, that is where no character
takes several tokens, the two are compared; tests/compat/completion has the rest.
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
