"""Speculative decoding: drafts spare evaluations, and change no token until rows are evicted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import pytest
from llama_cpp import LlamaGrammar
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from drop_in_cases import ROOMY, SMALL, WINDOW
from tiny_llama import tiny_llama, tiny_parent
from tiny_tokens import BOS


def greedy(llm: llama_cpp.Llama, prompt: Sequence[int], n_tokens: int) -> list[int]:
    return list(itertools.islice(llm.generate(prompt, temp=0.0), n_tokens))


def test_drafts_change_no_token(path: Path) -> None:
    prompt = [BOS, *[30, 31, 32, 33, 34] * 10]
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    texts = []
    for llm in (
        tiny_parent(path, n_ctx=WINDOW),
        tiny_parent(path, n_ctx=WINDOW, draft_model=drafts),
        tiny_llama(path, draft_model=drafts, **ROOMY),
    ):
        with contextlib.closing(llm):
            texts.append(greedy(llm, prompt, 150))
    assert texts[0] == texts[1] == texts[2]


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
        llm.prompt_progress = lambda done, _total: evaluated.append(done)
        tokens = list(itertools.islice(llm.generate(prompt, temp=0.0, grammar=grammar), 200))
        assert llm.detokenize(tokens) == (b"yes no " * 200)[: len(llm.detokenize(tokens))]
        assert max(evaluated[1:]) == 11
        assert llm.kv.compactions > 0
        assert len(evaluated) < 50
        assert llm.draft_model is not None
        llm.draft_model = None
        assert len(greedy(llm, prompt, 5)) == 5
