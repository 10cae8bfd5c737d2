"""Several answers to a prompt in one place: each is that of the prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from many_texts import tiny_engine
from needed import needed

OnePlace = needed("pyh2o.server.one_place", name="the server's packages").OnePlace
CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16}
N_NEW = 12


@pytest.mark.parametrize("recall", [0, 16])
def test_each_goes_back_to_the_end_of_the_prompt(
    model_path: Path, rng: np.random.Generator, recall: int
) -> None:
    """Wherever the prompt ends between two compactions, and whatever of it is there before."""
    with tiny_engine(model_path, texts=2, **CACHE, recall=recall) as engine:

        def answer(place: Any, tokens: list[int]) -> Any:
            bias = {2: -100.0}
            return place.create_completion(
                tokens, max_tokens=N_NEW, temperature=0.0, logit_bias=bias
            )["choices"][0]["text"]

        for n_tokens in range(40, 140, 3):
            tokens = [1, *rng.integers(3, 300, n_tokens).tolist()]
            with engine.text() as alone:
                alone.reset()
                expected = answer(alone, tokens)
                alone.reset()
            for _ in range(2):
                before = engine.batches.tokens
                with OnePlace(engine) as place:
                    texts = []
                    for _ in range(3):
                        with place.text(tokens, n_new=N_NEW) as llm:
                            texts.append(answer(llm, tokens))
                n_read = engine.batches.tokens - before - 3 * N_NEW
                assert n_read <= len(tokens) + 3 * 32, n_tokens  # a copy spares 32 or more
                if not recall:  # what is read at once looks for evicted rows together
                    assert texts == 3 * [expected], n_tokens
    assert engine.n_running == 0
