"""The prompt cache of a model that evicts: its states are used where they fit, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_cpp import LlamaRAMCache

from drop_in_cases import LONG_PROMPT, ROOMY, SMALL
from pyh2o import Llama
from same_results import assert_equal
from tiny_llama import tiny_llama
from tiny_tokens import BOS, NO_END


def reading(llm: Llama) -> list[int]:
    """Collects how many tokens are read for each prompt from now on."""
    counts: list[int] = []

    def count(done: int, total: int) -> None:
        if done == total:
            counts.append(total)

    llm.text.prompt_progress = count
    return counts


ANSWER: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0, "logit_bias": NO_END}


@pytest.mark.parametrize("settings", [ROOMY, SMALL], ids=["roomy", "small"])
def test_the_prompt_cache_spares_reading_a_text_again(path: Path, settings: dict[str, Any]) -> None:
    """An answer from a loaded state is the one from the text that was never left."""
    with tiny_llama(path, **settings) as llm, tiny_llama(path, **settings) as unspoilt:
        first = llm.tokenize(LONG_PROMPT.encode())[:200]
        llm.set_cache(LlamaRAMCache())
        for each in (llm, unspoilt):
            each.create_completion(first, **ANSWER)
        llm.create_completion([BOS, *range(30, 80)], **ANSWER)
        longer = [*unspoilt.input_ids[: unspoilt.n_tokens].tolist(), 40, 41, 42]
        counts = reading(llm)
        assert_equal(
            unspoilt.create_completion(longer, **ANSWER), llm.create_completion(longer, **ANSWER)
        )
        assert counts == [3]


def test_a_cached_state_whose_rows_are_evicted_is_not_used(path: Path) -> None:
    """Where the prompt leaves the text of the state, rows are missing: it is read anew."""
    with tiny_llama(path, **SMALL) as llm, tiny_llama(path, **SMALL) as fresh:
        text = llm.tokenize(LONG_PROMPT.encode())[:200]
        llm.set_cache(LlamaRAMCache())
        llm.create_completion(text, **ANSWER)
        llm.create_completion([BOS, *range(30, 80)], **ANSWER)
        branch = [*text[:100], *range(90, 190)]
        counts = reading(llm)
        assert_equal(
            fresh.create_completion(branch, **ANSWER), llm.create_completion(branch, **ANSWER)
        )
        assert sum(counts) == 200


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (SMALL, {**SMALL, "recent": 20}),
        (SMALL, {**SMALL, "evict": False}),
        ({**SMALL, "evict": False}, SMALL),
    ],
    ids=["other counts", "full from small", "small from full"],
)
@pytest.mark.parametrize("logits_all", [False, True])
def test_a_cached_state_of_other_settings_is_not_used(
    path: Path, saved: dict[str, Any], loaded: dict[str, Any], logits_all: bool
) -> None:
    """Caches may be shared by models that do not fit each other."""
    cache = LlamaRAMCache()
    with tiny_llama(path, logits_all=logits_all, **saved) as llm:
        text = llm.tokenize(LONG_PROMPT.encode())[:200]
        llm.set_cache(cache)
        llm.create_completion(text, **ANSWER)
    with (
        tiny_llama(path, logits_all=logits_all, **loaded) as llm,
        tiny_llama(path, logits_all=logits_all, **loaded) as fresh,
    ):
        llm.set_cache(cache)
        with pytest.warns(RuntimeWarning, match="cannot use a state of the prompt cache"):
            actual = llm.create_completion(text, **ANSWER)
        assert_equal(fresh.create_completion(text, **ANSWER), actual)
        more = [*text, *range(30, 60)]
        assert_equal(fresh.create_completion(more, **ANSWER), llm.create_completion(more, **ANSWER))


def test_log_probabilities_of_a_text_that_was_loaded_without(path: Path) -> None:
    """A model without logits_all keeps none: the prompt is read for them."""
    text = list(range(40, 70))
    asked: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "logprobs": 1, "echo": True}
    with (
        tiny_llama(path, logits_all=True, **ROOMY) as llm,
        tiny_llama(path, logits_all=True, **ROOMY) as alone,
        tiny_llama(path, **ROOMY) as plain,
    ):
        expected = alone.create_completion([*text, 70], **asked)
        alone.reset()
        for each in (alone, plain):
            each.eval(text)
        counts = reading(llm)
        for load in (
            lambda: llm.load_kv_state(plain.kv_state(), text),
            lambda: llm.load_state(plain.save_state()),
            lambda: llm.load_state(alone.save_state()),
        ):
            load()
            assert_equal(expected, llm.create_completion([*text, 70], **asked))
        assert counts == [31, 31]  # and nothing where the logits are in the state
