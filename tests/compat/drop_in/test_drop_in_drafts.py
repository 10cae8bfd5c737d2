"""Speculative decoding: drafts spare evaluations, and change no token until rows are evicted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from llama_cpp import LlamaGrammar
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from drop_in_cases import SMALL, WINDOW
from pyh2o.errors import SettingsError
from tiny_llama import EXACT_ROWS, tiny_llama
from tiny_tokens import BOS


def greedy(llm: llama_cpp.Llama, prompt: Sequence[int], n_tokens: int) -> list[int]:
    return list(itertools.islice(llm.generate(prompt, temp=0.0), n_tokens))


def test_drafts_in_a_full_cache_for_texts_of_several_batches(path: Path) -> None:
    """llama_cpp has room for the logits of one batch, and fails."""
    settings: dict[str, Any] = {"n_ctx": WINDOW, "evict": False, "n_batch": 16}
    prompt = [BOS, *[30, 31, 32, 33, 34] * 10]
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    with (
        tiny_llama(path, **settings) as plain,
        tiny_llama(path, draft_model=drafts, **settings) as drafting,
        tiny_llama(path, draft_model=drafts, **settings) as new,
    ):
        assert greedy(drafting, prompt, 150) == greedy(plain, prompt, 150)
        text = drafting.input_ids[: drafting.n_tokens].tolist()
        new.load_state(drafting.save_state())
        assert greedy(new, text, 20) == greedy(plain, text, 20)


@pytest.mark.parametrize("counts", [{}, {"recent": 4}, {"recent": 4, "slack": 1}], ids=str)
def test_drafts_change_no_token_until_rows_are_evicted(path: Path, counts: dict[str, int]) -> None:
    """From then on wrong drafts have a say, too: their attention stays in the scores.

    They can always be taken back, because no compaction comes amid them.
    """
    settings = {**SMALL, **counts}
    prompt = [BOS, *[30, 31, 32, 33, 34] * 8]
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    with (
        tiny_llama(path, **settings) as plain,
        tiny_llama(path, draft_model=drafts, **settings) as drafting,
    ):
        expected, actual = (greedy(llm, prompt, 150) for llm in (plain, drafting))
        n_same = plain.kv.capacity - len(prompt)
        assert actual[:n_same] == expected[:n_same]
        assert drafting.kv.compactions == plain.kv.compactions > 0
        assert drafting.kv.used <= drafting.kv.capacity
        assert drafting.input_ids[len(prompt) : len(prompt) + 149].tolist() == actual[:149]
        if settings["slack"] == 1:
            assert actual == expected


def test_drafts_are_taken(path: Path) -> None:
    """Several tokens are evaluated at once where they repeat the text."""
    evaluated: list[int] = []
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    with tiny_llama(path, draft_model=drafts, **{**SMALL, "slack": 80}) as llm:
        prompt = llm.tokenize(b"yes no yes no ")
        grammar = LlamaGrammar.from_string('root ::= ("yes no ")+', verbose=False)
        llm.text.prompt_progress = lambda done, _total: evaluated.append(done)
        tokens = list(itertools.islice(llm.generate(prompt, temp=0.0, grammar=grammar), 200))
        assert llm.detokenize(tokens) == (b"yes no " * 200)[: len(llm.detokenize(tokens))]
        assert max(evaluated[1:]) == 11
        assert llm.kv.compactions > 0
        assert len(evaluated) < 50
        assert llm.draft_model is not None
        llm.draft_model = None
        assert len(greedy(llm, prompt, 5)) == 5


@pytest.mark.parametrize("settings", [SMALL, {"n_ctx": WINDOW, "evict": False}], ids=str)
def test_tokens_sent_that_have_no_logits_are_refused(path: Path, settings: dict[str, Any]) -> None:
    """A generator compares what was sent with what it draws; the process ended."""
    for logits_all, n_sent in ((True, 20), (False, 3)):
        with tiny_llama(path, n_batch=16, logits_all=logits_all, **settings) as llm:
            tokens = llm.generate([BOS, *range(30, 42)], temp=0.0)
            next(tokens)
            with pytest.raises(SettingsError, match="logits_all=True, and send fewer") as error:
                tokens.send(list(range(30, 30 + n_sent)))
            assert "\n" not in str(error.value)
            assert len(greedy(llm, [BOS, 40, 41], 5)) == 5


@pytest.mark.parametrize("n_batch", [8, 24])
@pytest.mark.parametrize("n_before", [1, 24, 150])
def test_drafts_are_not_cut_by_a_batch(path: Path, n_batch: int, n_before: int) -> None:
    """Batches end at places of the text; with one end amid drafts the process ended."""
    settings = {**SMALL, "slack": 40, "n_batch": n_batch, "policy": "streaming", **EXACT_ROWS}
    prompt = [BOS, *([50, 60, 70, 80, 90] * 30)[:n_before], *[30, 31, 32, 33, 34] * 4]
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    with (
        tiny_llama(path, **settings) as plain,
        tiny_llama(path, draft_model=drafts, **settings) as drafting,
    ):
        # a policy without scores does not know what was drafted
        assert greedy(drafting, prompt, 90) == greedy(plain, prompt, 90)
