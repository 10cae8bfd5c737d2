"""Any cut, save and load goes on at the exact token, and nothing of the text is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conversations import next_logits
from pyh2o import Llama
from pyh2o.errors import PyH2OError
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from stories import LOOPING, PROMPT, cuts, in_pieces, result, whole
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

SETTINGS = [
    {"sampling": Sampling(seed=1)},
    {"sampling": Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=2)},
    {"sampling": Sampling(temperature=1.0, repeat_penalty=1.0, presence_penalty=0.3, seed=3)},
    {"sampling": Sampling(temperature=0, repeat_penalty=1.2), "echo": True},
    {"sampling": LOOPING, "loop_guard": False},
    {"sampling": LOOPING},
]


@pytest.mark.usefixtures("no_end")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("evict", [True, False])
def test_a_story_that_was_cut_is_the_same(
    llm: Llama,
    other: Llama,
    full: Llama,
    tmp_path: Path,
    rng: np.random.Generator,
    settings: dict[str, Any],
    evict: bool,
) -> None:
    llms = [llm, other] if evict else [full]
    expected = whole(llms[0], 400, **settings)
    assert len(expected.tokens) > 400
    assert expected.finish == "length"
    assert (llms[0].kv.compactions > 10) == evict
    assert in_pieces(llms, tmp_path / "s.h2o", cuts(rng, 400), **settings) == expected


@pytest.mark.usefixtures("no_end")
def test_a_story_that_goes_on_with_another_number_of_threads_is_the_same(
    model: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Bit for bit, where there are cells enough to be cut into parts."""
    llms = [
        tiny_llama(model, n_ctx=1024, hh=200, recent=200, slack=112, n_threads=n, n_threads_batch=n)
        for n in (1, 2)
    ]
    expected = whole(llms[0], 600, sampling=Sampling(seed=8))
    logits = next_logits(llms[0])
    pieces = cuts(rng, 600, 4)
    assert in_pieces(llms, tmp_path / "s.h2o", pieces, sampling=Sampling(seed=8)) == expected
    np.testing.assert_array_equal(next_logits(llms[1]), logits)


@pytest.mark.usefixtures("no_end")
def test_a_story_beyond_the_trained_context_that_was_cut_is_the_same(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_gguf(tmp_path / "short.gguf", seed=3, n_ctx_train=200)
    llms = [tiny_llama(path, hh=20, recent=20, slack=8) for _ in range(2)]
    expected = whole(llms[0], 700, sampling=Sampling(seed=6))
    assert llms[0].kv.rebases > 2
    pieces = cuts(rng, 700, 8)
    assert in_pieces(llms, tmp_path / "s.h2o", pieces, sampling=Sampling(seed=6)) == expected


@pytest.mark.usefixtures("no_end")
def test_a_model_used_for_something_else_reads_the_story_again(full: Llama) -> None:
    sampling = Sampling(temperature=0, repeat_penalty=1.1)
    expected = whole(full, 100, sampling=sampling)
    tale = Story(full, PROMPT, sampling=sampling)
    text = "".join(tale.write(30)) + "".join(tale.write(30))
    n_prompt = tale.n_read
    full.create_completion("The end of the world", max_tokens=30)
    text += "".join(tale.write(40))
    assert tale.n_read == n_prompt + len(expected.tokens) - 40
    assert result(tale, text) == expected


def test_using_the_model_amid_a_story_is_noticed(llm: Llama) -> None:
    tale = Story(llm, PROMPT)
    writing = tale.write(20)
    text = "".join(next(writing) for _ in range(10))
    written = list(tale.tokens)
    llm.reset()
    llm.eval([1, 2, 3])
    with pytest.raises(PyH2OError, match="used for another text"):
        next(writing)
    assert tale.tokens == written
    text += "".join(tale.write(10))
    assert (tale.text(), tale.written) == (text, 20)
    assert llm.input_ids[: len(written)].tolist() == written
