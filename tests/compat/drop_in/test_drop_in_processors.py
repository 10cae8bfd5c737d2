"""Logits processors that fail: nothing is drawn as if they had not been there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList

from drop_in_cases import PROMPT, SMALL
from pyh2o import Llama
from pyh2o.errors import SettingsError
from tiny_llama import tiny_llama
from tiny_tokens import NO_END


class FourthCall:
    """A logits processor that fails when it is called for the fourth time."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.n_calls = 0

    def __call__(self, _ids: Any, logits: Any) -> Any:
        self.n_calls += 1
        if self.n_calls == 4:
            raise self.error
        return logits


def complete(llm: Llama, *processors: Any, **arguments: Any) -> list[str]:
    """The pieces of a completion."""
    arguments = {"max_tokens": 12, "seed": 5, "logit_bias": NO_END, **arguments}
    listed = LogitsProcessorList(processors)
    chunks = llm(PROMPT, stream=True, logits_processor=listed, **arguments)
    return [chunk["choices"][0]["text"] for chunk in chunks]


@pytest.mark.parametrize("rules", [None, 'root ::= ("yes" | "no")+'], ids=["", "grammar"])
@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=repr)
def test_what_a_processor_raises_reaches_the_caller(
    path: Path, rules: str | None, error: BaseException
) -> None:
    """llama_cpp prints it, and draws from logits that were not processed."""
    grammar = LlamaGrammar.from_string(rules, verbose=False) if rules else None
    with tiny_llama(path, **SMALL) as llm, tiny_llama(path, **SMALL) as anew:
        fails = FourthCall(error)
        with pytest.raises(type(error)) as raised:
            complete(llm, fails, grammar=grammar)
        assert raised.value is error
        assert fails.n_calls == 4
        assert complete(llm, grammar=grammar) == complete(anew, grammar=grammar)


@pytest.mark.parametrize("value", [-np.inf, np.nan], ids=str)
@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.8])
def test_processors_that_leave_no_token(path: Path, value: float, temperature: float) -> None:
    with tiny_llama(path, **SMALL) as llm:
        biases = dict.fromkeys(range(llm.n_vocab()), value)
        with pytest.raises(SettingsError, match="leave no token to sample") as error:
            complete(llm, logit_bias=biases, temperature=temperature)
        assert "\n" not in str(error.value)
        assert complete(llm)
