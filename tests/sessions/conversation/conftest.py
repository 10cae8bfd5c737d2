"""Models whose draws are written down, for the tests of conversations."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from conversations import EVICTING, Trap
from pyh2o import Llama
from pyh2o.core.text import Text
from pyh2o.writing import answer as answer_module
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.writer import Writer
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", CHATML, n_layer=2)


@pytest.fixture
def llm(path: Path) -> Llama:
    return tiny_llama(path, **EVICTING)


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What every writer has drawn, one list each; answers do not end by themselves.

    A random model ends one answer in a hundred at any token, and tests should not depend on which.
    """
    lists: list[list[int]] = []

    class Endless(Writer):
        def __init__(self, llm: Llama, sampling: Sampling, **before: Any) -> None:
            ends = [token for token in range(llm.model.n_vocab) if llm.model.is_end(token)]

            def ban_ends(_tokens: Any, logits: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
                logits[ends] = -np.inf
                return logits

            super().__init__(llm, sampling, **{**before, "logits_processor": ban_ends})

        def write(self, tokens: Sequence[int]) -> Generator[int]:
            lists.append([])
            for token in super().write(tokens):
                lists[-1].append(token)
                yield token

    monkeypatch.setattr(answer_module, "Writer", Endless)
    return lists


@pytest.fixture
def with_ends(drawn: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end where the model ends them."""

    class Recording(Writer):
        def write(self, tokens: Sequence[int]) -> Generator[int]:
            drawn.append([])
            for token in super().write(tokens):
                if not self._text.model.is_end(token):
                    drawn[-1].append(token)
                yield token

    monkeypatch.setattr(answer_module, "Writer", Recording)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each evaluation had, of all models."""
    counts: list[int] = []
    evaluate = Text._evaluate

    def counting(text: Text, tokens: Sequence[int]) -> None:
        evaluate(text, tokens)
        counts.append(len(tokens))

    monkeypatch.setattr(Text, "_evaluate", counting)
    return counts


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Trap:
    """In the decoding of a batch, before its tokens are recorded."""
    trap = Trap()
    monkeypatch.setattr(llama_cpp, "llama_decode", trap.around(llama_cpp.llama_decode))
    return trap
