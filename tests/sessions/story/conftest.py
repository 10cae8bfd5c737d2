"""Models for the tests of stories, some with draws that the test writes down."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.sessions import story
from pyh2o.sessions.story import Story
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", seed=17, n_ctx_train=1 << 17
    )


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Llama]:
    yield from opened(model, n_ctx=1024, hh=20, recent=20, slack=8)


@pytest.fixture(scope="module")
def other(model: Path) -> Iterator[Llama]:
    """The same model with the same settings, as in another process."""
    yield from opened(model, n_ctx=1024, hh=20, recent=20, slack=8)


@pytest.fixture(scope="module")
def full(model: Path) -> Iterator[Llama]:
    yield from opened(model, n_ctx=512, evict=False)


def opened(model: Path, **settings: Any) -> Iterator[Llama]:
    llm = tiny_llama(model, **settings)
    yield llm
    llm.close()


@pytest.fixture
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model may end its text at any token; here it does not."""
    forbid = Story._forbid

    def forbid_end_too(self: Story, input_ids: Any, logits: Any) -> Any:
        logits[self.llm.model.native.token_eos()] = -np.inf
        return forbid(self, input_ids, logits)

    monkeypatch.setattr(Story, "_forbid", forbid_end_too)


class ScriptedWriter:
    """Draws what the test wants."""

    script: list[int]

    def __init__(self, llm: Llama, *_: Any, written: Sequence[int], **__: Any) -> None:
        self._llm = llm
        self._at = len(written)

    def write(self, tokens: Sequence[int]) -> Generator[int, None, None]:
        self._llm.eval(tokens)
        while True:
            token = self.script[self._at]
            self._at += 1
            yield token
            self._llm.eval([token])


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, llm: Llama) -> Callable[[bytes], None]:
    """Lets stories have this text, a token for each byte."""
    byte_0 = llm.tokenize(b"\x01", add_bos=False)[-1] - 1

    def script(text: bytes) -> None:
        ScriptedWriter.script = [byte_0 + byte for byte in text]

    monkeypatch.setattr(story, "Writer", ScriptedWriter)
    return script
