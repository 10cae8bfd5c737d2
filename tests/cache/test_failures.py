"""What is said of tokens that llama.cpp cannot evaluate."""

from __future__ import annotations

from pathlib import Path

import pytest

from broken_weights import POLICY, infinite_model
from many_texts import tiny_engine
from pyh2o import Llama
from pyh2o.errors import DecodeError
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

CACHE = {"n_ctx": 256, "hh": 16, "recent": 16, "slack": 8, "policy": POLICY}
NO_NUMBERS = (
    "the attention of the model is infinite or no number, so that no rows can be chosen: its file "
    "is damaged or was converted wrongly; get it again, or use another model"
)


def failure_of(llm: Llama, size: int) -> str:
    """What is said at last of pieces of so many tokens."""
    try:
        for _ in range(100):
            llm.eval([5] * size)
    except DecodeError as error:
        return str(error)
    return "nothing"


def test_attention_that_is_infinite(tmp_path: Path) -> None:
    with tiny_llama(infinite_model(tmp_path / "a.gguf"), **CACHE) as llm:
        for size in (1, 20):
            llm.reset()
            assert failure_of(llm, size) == NO_NUMBERS
        llm.reset()
        llm.eval([5] * 40)
        assert llm.n_tokens == 40


def test_the_same_among_other_texts(tmp_path: Path) -> None:
    with tiny_engine(infinite_model(tmp_path / "a.gguf"), texts=2, **CACHE) as engine:
        for size in (1, 20):
            with engine.text() as llm:
                llm.reset()
                assert failure_of(llm, size) == NO_NUMBERS


def test_anything_else_that_llama_cpp_says(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", seed=1)
    with tiny_llama(path, **CACHE) as llm:
        for size in (1, 10):
            with pytest.raises(RuntimeError) as caught:
                llm.eval([1000] * size)
            assert str(caught.value) == (
                "llama.cpp could not evaluate the tokens (llama_decode returned -1): invalid "
                "token[0] = 1000; verbose=True (--verbose) shows its log"
            )
