"""States in the prompt cache, as llama_cpp has them."""

from __future__ import annotations

import llama_cpp
import pytest
from llama_cpp import LlamaRAMCache

from completions import complete
from pyh2o import Llama
from same_results import assert_equal
from tiny_tokens import ONLY_ASCII


@pytest.mark.parametrize("stream", [False, True])
def test_states_are_cached_as_in_llama_cpp(
    stock: llama_cpp.Llama, full: Llama, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    arguments = {"seed": 8, "max_tokens": 10, "logit_bias": ONLY_ASCII, "stream": stream}
    keys, answers, loads = [], [], []
    for model in (stock, full):
        monkeypatch.setattr(
            model, "load_state", lambda s, m=model: loads.append(type(m).load_state(m, s))
        )
        cache = LlamaRAMCache()
        monkeypatch.setattr(model, "cache", cache)
        for given in ("A prompt", "Another one", "A prompt"):
            result = complete(model, given, **arguments)
            answers.append(list(result) if stream else [result])
        keys.append(list(cache.cache_state))
    assert_equal(answers[:3], answers[3:])
    assert keys[0] == keys[1]
    assert len(loads) == 4
