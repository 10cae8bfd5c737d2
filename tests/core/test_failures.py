"""Error messages of tokens that llama.cpp cannot evaluate."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from broken_weights import POLICY, infinite_model, model_with_infinite_token
from many_texts import llama_in, tiny_engine
from pyh2o import Llama
from pyh2o.core.failures import check_logits
from pyh2o.errors import DecodeError
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.writer import Writer
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

CACHE = {"n_ctx": 256, "hh": 16, "recent": 16, "slack": 8, "policy": POLICY}
NO_NUMBERS = (
    "the attention of the model is infinite or no number, so that rows cannot be scored: its file "
    "is damaged or was converted wrongly; get it again, or use another model"
)
INFINITE = 9
NO_TOKEN = (
    "the output of the model is infinite or NaN, so that no token can be sampled: its file is "
    "damaged or was converted wrongly; get it again, or use another model"
)


def failure_of(llm: Llama, size: int) -> str:
    """Return the error after reading chunks of these sizes."""
    try:
        for _ in range(100):
            llm.eval([5] * size)
    except DecodeError as error:
        return str(error)
    return "nothing"


def test_infinite_attention_is_reported(tmp_path: Path) -> None:
    with tiny_llama(infinite_model(tmp_path / "a.gguf"), **CACHE) as llm:
        for size in (1, 20):
            llm.reset()
            assert failure_of(llm, size) == NO_NUMBERS
        llm.reset()
        llm.eval([5] * 40)
        assert llm.n_tokens == 40


def test_infinite_attention_is_reported_among_other_texts(tmp_path: Path) -> None:
    with tiny_engine(infinite_model(tmp_path / "a.gguf"), texts=2, **CACHE) as engine:
        for size in (1, 20):
            with llama_in(engine) as llm:
                llm.reset()
                assert failure_of(llm, size) == NO_NUMBERS


@pytest.mark.parametrize("policy", ["streaming", "full"])
def test_nan_logits_are_reported(tmp_path: Path, policy: str) -> None:
    """This model does not choose rows by attention, so sampling is the first to notice."""
    eviction = {"policy": policy} if policy != "full" else {"evict": False}
    settings = {"n_ctx": 256, "hh": 16, "recent": 16, "slack": 8, **eviction}
    path = infinite_model(tmp_path / "a.gguf")
    with tiny_llama(path, **settings) as llm:
        assert error_of_sampling(llm) == [NO_TOKEN] * 3
    with tiny_engine(path, texts=2, **settings) as engine, llama_in(engine) as llm:
        assert error_of_sampling(llm) == [NO_TOKEN] * 3


def error_of_sampling(llm: Llama) -> list[str]:
    """Return the error of sampling a token, for each way to sample."""
    said = []
    for draw in (
        lambda: (llm.eval([5] * 3), llm.sample()),
        lambda: llm.create_completion([5] * 3, max_tokens=4, temperature=0.0),
        lambda: list(islice(Writer(llm, Sampling()).write([5] * 3), 4)),
    ):
        llm.reset()
        with pytest.raises(DecodeError) as caught:
            draw()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("arch_variant", ["llama", "sliding_window"])
def test_a_new_text_after_nan_rows_is_finite(
    tmp_path: Path, arch_variant: str, flash_attn: bool, evict: bool
) -> None:
    """Nan rows used to stay in freed cells: 0 times nan is nan."""
    settings = {"n_ctx": 256, "hh": 16, "recent": 16, "slack": 8, "flash_attn": flash_attn}
    settings = {**settings, "evict": evict, "logits_all": True}
    path = tmp_path / "a.gguf"
    model_with_infinite_token(path, INFINITE, arch_variant=arch_variant, n_layer=4)
    with tiny_llama(path, **settings) as llm:
        texts = [[1, 2, 3], [1, 2, 3, INFINITE, 4], [1, 2, 3]]
        first, broken, last = (logits_of(llm, text) for text in texts)
        assert np.isfinite(first).all()
        assert np.isnan(broken).any()
        np.testing.assert_array_equal(last, first)
    if not (evict or flash_attn):
        return  # llama.cpp's own cache of several texts cannot drop the rows of one text
    with tiny_engine(path, texts=2, **settings) as engine:
        for i in range(2):
            with llama_in(engine) as llm:
                logits_of(llm, [1, 2, 3, INFINITE, 4])
            with llama_in(engine) as llm, llama_in(engine) as other:
                for each in (llm, other):
                    assert np.isfinite(logits_of(each, [1, 2, 3])).all(), i


def logits_of(llm: Llama, tokens: list[int]) -> npt.NDArray[np.single]:
    """Return logits after a new text of these tokens, for all tokens but the infinite one."""
    llm.reset()
    llm.eval(tokens)
    return np.delete(llm.text.logits[-1], INFINITE)


def test_infinite_tokens_that_are_never_sampled_do_no_harm() -> None:
    logits = np.array([0.5, -np.inf, 1.5], np.single)
    check_logits(logits)
    for nothing in (np.nan, np.inf):
        logits[1] = nothing
        with pytest.raises(DecodeError, match="no token can be sampled"):
            check_logits(logits)


def test_other_errors_of_llama_cpp_are_reported(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", seed=1)
    with tiny_llama(path, **CACHE) as llm:
        for size in (1, 10):
            with pytest.raises(RuntimeError) as caught:
                llm.eval([1000] * size)
            assert str(caught.value) == (
                "llama.cpp failed to evaluate the tokens (llama_decode returned -1): invalid "
                "token[0] = 1000; see its log with verbose=True (--verbose)"
            )
