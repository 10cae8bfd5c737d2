"""Recall on tiny random models: which rows answer the question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measured import results
from research.eval.caches import Compute, open_llama
from research.eval.measurement import CacheSettings
from research.eval.prompts import Prompter
from research.eval.reading import answer_surprises
from research.eval.recall import Recall, RecallSettings
from research.eval.samples import Sample
from tiny_llama import tiny_llama


def recall_settings(path: Path, **changes: Any) -> RecallSettings:
    settings = RecallSettings(
        model=path,
        compute=Compute(threads=1),
        tasks=("niah_multikey_2", "fwe"),
        tokens=(900,),
        samples=2,
        questions=("after", "before"),
        caches=CacheSettings(("h2o",), (150,)),
    )
    return replace(settings, **changes)


@pytest.mark.parametrize("is_chat", [True, False])
def test_prompt_is_cut_where_the_question_begins(
    path: Path, chat_path: Path, is_chat: bool
) -> None:
    sample = Sample(
        "Some text. A fact.", "\nWhat is it?", " It is", ("one", "two"), places=("A fact",)
    )
    with tiny_llama(chat_path if is_chat else path, n_ctx=512) as llm:
        prompter = Prompter(llm)
        prompt = prompter.prompt(sample)
        assert prompter.is_chat == is_chat

        def text(tokens: list[int]) -> str:
            return llm.detokenize(tokens, special=True).decode()

        assert text(prompt.context).endswith("Some text. A fact.\n")
        rest = text(prompt.asked)
        if is_chat:
            words = "What is it?<|im_end|> <|im_start|> assistant It is"
            assert " ".join(rest.split()) == words
            assert text(prompt.context).startswith("<s>") or "<|im_start|>" in text(prompt.context)
        else:
            assert rest.strip().replace("  ", " ") == "What is it? It is"
            assert prompt.context[0] == llm.token_bos()
        assert text(prompt.answer).strip() == "one, two"
        ((start, end),) = prompt.places
        assert text(prompt.context[start:end]).strip() == "A fact"
        assert prompt.n_tokens == len(prompt.context) + len(prompt.asked)
        assert prompter.prompt(replace(sample, question="\nWho?")).context == prompt.context


@pytest.mark.parametrize(("model", "tokens"), [("path", 900), ("chat_path", 2500)])
def test_questions_are_asked_of_the_rows_that_stayed(
    model: str, tokens: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    caches = CacheSettings(("h2o",), (150,), recalls=(0,))
    settings = recall_settings(
        path, tasks=("niah_multikey_2",), samples=1, tokens=(tokens,), caches=caches
    )
    recall = Recall(settings, file := results())
    recall.run()
    (_, prompt) = recall._samples["niah_multikey_2", tokens, 0]
    cache = caches.for_text(tokens)[1]
    full = file.units[f"niah_multikey_2/{tokens}/any/full/0"]["nll"]
    for when, prefill in (("after", "stream"), ("before", "exact")):
        unit = file.units[f"niah_multikey_2/{tokens}/{when}/{cache.name}/0"]
        compute = settings.compute
        with open_llama(path, cache, window=tokens, compute=compute, prefill=prefill) as llm:
            if when == "after":
                llm.eval(prompt.context)
                llm.eval(prompt.asked[:-1])
            else:
                llm.eval([*prompt.context, *prompt.asked[:-1]])
            loss = answer_surprises(llm, prompt.asked[-1], prompt.answer).mean()
        assert unit["nll"] == pytest.approx(loss, abs=1e-3)
        assert unit["nll"] != pytest.approx(full, abs=1e-3)


def test_recall_of_a_budget_that_covers_the_text_is_the_full_cache_s(path: Path) -> None:
    caches = CacheSettings(("h2o",), (900,), recalls=(0,))
    Recall(recall_settings(path, tasks=("fwe",), caches=caches, samples=1), file := results()).run()
    full, *others = [unit["nll"] for unit in file.units.values()]
    assert others == pytest.approx([full] * 2, abs=1e-3)
