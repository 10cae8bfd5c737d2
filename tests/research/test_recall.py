"""Recall on tiny random models: prompts, answers and what they sum up to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measured import results
from pyh2o.errors import SettingsError
from research.eval import recall as recall_module
from research.eval.caches import Compute, open_llama
from research.eval.measurement import CacheSettings, grouped
from research.eval.metrics import share_within
from research.eval.model import NamedText
from research.eval.prompts import Prompter
from research.eval.reading import answer_surprises, spans_recalled
from research.eval.recall import Recall, RecallSettings, answered, summed_up
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


def test_recall(path: Path) -> None:
    recall = Recall(recall_settings(path), file := results())
    recall.run()
    assert recall.notes == ("the model has no chat template: it goes on with the plain text",)
    assert len(file.units) == 12
    for unit in file.units.values():
        assert 900 * 0.7 < unit["prompt_tokens"] <= 900 - 50
        assert unit["recall"] == (unit["rows"] and 18)
        found = [one.lower() in unit["answer"].lower() for one in unit["references"]]
        assert unit["score"] == sum(found) / len(found)
        if unit["cache"] == "full":
            assert unit["found"] is unit["attention"] is None
        else:
            assert 0 < unit["attention"] < 1
            assert unit["found"] is not None or unit["task"] == "fwe"
    tables = recall.tables()
    assert [one.title for one in tables] == [
        f"{task}, 900 tokens, {n} samples"
        for task, n in (("niah_multikey_2", 2), ("fwe", 2), ("all tasks", 4))
    ]
    caches = [("full", ""), ("h2o, 150 rows", "after"), ("h2o, 150 rows", "before")]
    for table in tables:
        assert [(row[0], row[table.headings.index("question")]) for row in table.rows] == caches
    by_cache = grouped(file.units.values(), lambda one: (one["cache"], one["question"]))
    full = [one["nll"] for one in by_cache[caches[0]]]
    for key in caches[1:]:
        own = np.array([one["nll"] for one in by_cache[key]])
        figures = summed_up(by_cache[key], by_cache[caches[0]])
        difference = own - full
        assert figures["nll"] == pytest.approx(own.mean())
        assert figures["nll_to_full"] == pytest.approx(difference.mean())
        assert figures["nll_to_full_error"] == pytest.approx(difference.std(ddof=1) / 2)
    # eviction changes what is expected, and not the same way in both settings
    assert len({np.mean([one["nll"] for one in units]) for units in by_cache.values()}) == 3


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


def test_evicted_rows_are_found_for_the_question(path: Path) -> None:
    caches = CacheSettings(("h2o",), (80,), recalls=(0, 20))
    settings = recall_settings(path, tasks=("niah_multikey_2",), samples=1, caches=caches)
    recall = Recall(settings, file := results())
    recall.run()
    for when in ("after", "before"):
        without, finding = (
            file.units[f"niah_multikey_2/900/{when}/{cache.name}/0"]
            for cache in caches.for_text(900)[1:]
        )
        assert without["found"] is without["attention"] is None
        assert 0 < finding["attention"] < 1
        assert finding["nll"] != without["nll"]
    # by hand
    sample, prompt = recall._samples["niah_multikey_2", 900, 0]
    cache = caches.for_text(900)[2]
    told = file.units[f"niah_multikey_2/900/after/{cache.name}/0"]
    with open_llama(path, cache, window=900, compute=settings.compute) as llm:
        llm.eval(prompt.context)
        llm.text.read(prompt.asked[:-1])
        passages = spans_recalled(llm)
        assert passages
        one = answered(llm, sample, prompt, 128)
        assert one == {name: told[name] for name in one}
        if share_within(prompt.places, passages, before=llm.kv.archived):
            assert one["found"]
    rows = [row[1] for row in recall.tables()[0].rows]
    assert rows[1:] == 2 * ["80 (256)"] + 2 * ["60 (256) + 20"]


def test_places_of_the_answer_are_looked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for = []

    def share(places: list[tuple[int, int]], spans: object, before: int) -> float:
        looked_for.append(places)
        assert 0 < before < 900
        return float(len(looked_for) < 2)

    monkeypatch.setattr(recall_module, "share_within", share)
    recall = Recall(
        recall_settings(path, tasks=("niah_single_1",), questions=("after",)), results()
    )
    recall.run()
    assert looked_for == [recall._samples["niah_single_1", 900, i][1].places for i in range(2)]
    (table,) = recall.tables()
    assert table.rows[1][table.headings.index("passage found")] == "50%"


def test_recall_of_a_budget_that_covers_the_text_is_the_full_cache_s(path: Path) -> None:
    caches = CacheSettings(("h2o",), (900,), recalls=(0,))
    Recall(recall_settings(path, tasks=("fwe",), caches=caches, samples=1), file := results()).run()
    full, *others = [unit["nll"] for unit in file.units.values()]
    assert others == pytest.approx([full] * 2, abs=1e-3)


def test_made_up_prose_is_said(path: Path) -> None:
    settings = recall_settings(path, tasks=("niah_single_2",), samples=1)
    assert "the prose is made up" in Recall(settings, results()).notes[0]
    own = replace(settings, prose=NamedText("a", "It rained. The cat slept. " * 50))
    assert len(Recall(own, results()).notes) == 1


def test_refused_recall(path: Path) -> None:
    with pytest.raises(SettingsError, match="--tokens 2000 is more than the 1024"):
        Recall(recall_settings(path, tokens=(2000,)), results())
    with pytest.raises(SettingsError, match="there is no task 'x'"):
        Recall(recall_settings(path, tasks=("x",)), results())
