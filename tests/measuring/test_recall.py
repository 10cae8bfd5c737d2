"""Recall on tiny random models: prompts, answers and what they sum up to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measured import Quiet, results, without_times
from pyh2o.errors import SettingsError
from pyh2o.measuring.caches import Compute
from pyh2o.measuring.measurement import CacheSettings
from pyh2o.measuring.model import NamedText
from pyh2o.measuring.quality.prompts import Prompter
from pyh2o.measuring.quality.reading import answer_surprises
from pyh2o.measuring.quality.recall import Recall, RecallSettings
from pyh2o.measuring.quality.samples import Sample
from tiny_llama import tiny_llama


def recall_settings(path: Path, **changes: Any) -> RecallSettings:
    settings = RecallSettings(
        model=path,
        compute=Compute(threads=1),
        tasks=("niah_multikey_2", "fwe"),
        tokens=(900,),
        samples=2,
        questions=("after", "before"),
        prose=None,
        seed=0,
        caches=CacheSettings(("h2o",), (150,), 0.5),
    )
    return replace(settings, **changes)


@pytest.mark.parametrize("is_chat", [True, False])
def test_prompt_is_cut_where_the_question_begins(
    path: Path, chat_path: Path, is_chat: bool
) -> None:
    sample = Sample("Some text. A fact.", "\nWhat is it?", " It is", ("one", "two"))
    with tiny_llama(chat_path if is_chat else path, n_ctx=512) as llm:
        prompter = Prompter(llm)
        prompt = prompter.prompt(sample)
        assert prompter.is_chat == is_chat

        def text(tokens: list[int]) -> str:
            return llm.detokenize(tokens, special=True).decode()

        assert text(prompt.context).endswith("Some text. A fact.\n")
        rest = text(prompt.rest)
        if is_chat:
            words = "What is it?<|im_end|> <|im_start|> assistant It is"
            assert " ".join(rest.split()) == words
            assert text(prompt.context).startswith("<s>") or "<|im_start|>" in text(prompt.context)
        else:
            assert rest.strip().replace("  ", " ") == "What is it? It is"
            assert prompt.context[0] == llm.token_bos()
        assert text(prompt.answer).strip() == "one, two"
        other = prompter.prompt(replace(sample, question="\nWho?"))
        assert other.context == prompt.context


def test_recall(path: Path, tmp_path: Path) -> None:
    progress = Quiet()
    target = tmp_path / "a.json"
    recall = Recall(recall_settings(path), results(target), progress)
    recall.run()
    assert progress.planned == progress.done == 2 * 2 * 3 * 900
    assert recall.notes == ("the model has no chat template: it goes on with the plain text",)
    summaries = recall.summaries()
    caches = [("full", ""), ("h2o, 150 rows", "after"), ("h2o, 150 rows", "before")]
    assert [(one.task, one.cache, one.question) for one in summaries] == [
        (task, *cache) for task in ("niah_multikey_2", "fwe", "all") for cache in caches
    ]
    units = json.loads(target.read_text())["units"]
    assert len(units) == 12
    for unit in units.values():
        assert 900 * 0.7 < unit["prompt_tokens"] <= 900 - 50
        assert unit["answer"]
        found = [one.lower() in unit["answer"].lower() for one in unit["references"]]
        assert unit["score"] == sum(found) / len(found)
    by_cache = {(one.cache, one.question): one for one in summaries if one.task == "all"}
    full = [unit["nll"] for unit in units.values() if unit["cache"] == "full"]
    for (cache, question), one in by_cache.items():
        own = [u["nll"] for u in units.values() if (u["cache"], u["question"]) == (cache, question)]
        assert one.samples == len(own) == 4
        assert one.nll == pytest.approx(np.mean(own))
        if cache != "full":
            difference = np.array(own) - full
            assert one.nll_to_full == pytest.approx(difference.mean())
            assert one.nll_to_full_error == pytest.approx(difference.std(ddof=1) / 2)
    # eviction changes what is expected, and not the same way in both settings
    assert len({one.nll for one in by_cache.values()}) == 3


def test_recall_of_a_budget_that_covers_the_text_is_the_full_cache_s(path: Path) -> None:
    caches = CacheSettings(("h2o",), (900,), 0.5)
    recall = Recall(recall_settings(path, caches=caches, samples=1), results(), Quiet())
    recall.run()
    full, *others = [one for one in recall.summaries() if one.task == "fwe"]
    for one in others:
        assert one.nll == pytest.approx(full.nll, abs=1e-3)
        assert one.nll_to_full == pytest.approx(0, abs=1e-3)


def test_right_answer_is_the_likelier_the_better_it_fits(path: Path) -> None:
    """What is measured is the likelihood of the answer itself: greedy tokens have the highest."""
    with tiny_llama(path, n_ctx=512) as llm:
        llm.eval(list(range(10, 60)))
        best = int(np.argmax(llm._ctx.get_logits_ith(-1)[:384]))
        llm.remove_tail(49)
        losses = [answer_surprises(llm, 59, [token])[0] for token in range(384)]
    assert int(np.argmin(losses)) == best
    assert np.exp(-np.array(losses, dtype=np.float64)).sum() == pytest.approx(1, abs=1e-4)


def test_recall_is_resumed_and_the_same_in_every_run(path: Path, tmp_path: Path) -> None:
    settings = recall_settings(path, tasks=("fwe",), samples=2)
    whole = results(tmp_path / "a.json")
    Recall(settings, whole, Quiet()).run()
    Recall(replace(settings, samples=1), results(tmp_path / "b.json"), Quiet()).run()
    progress = Quiet()
    rest = results(tmp_path / "b.json")
    Recall(settings, rest, progress).run()
    assert progress.planned == 3 * 900
    assert without_times(rest.units) == without_times(whole.units)
    other = results()
    Recall(replace(settings, seed=1), other, Quiet()).run()
    assert without_times(other.units) != without_times(whole.units)


def test_unit_with_other_figures_is_refused(path: Path) -> None:
    settings = recall_settings(path, tasks=("fwe",), samples=1, questions=("after",))
    recall = Recall(settings, file := results(), Quiet())
    recall.run()
    del file.units["fwe/900/any/full/0"]["score"]
    with pytest.raises(SettingsError, match=r"damaged .fwe/900/any/full/0 has other figures"):
        recall.summaries()


def test_made_up_prose_is_said(path: Path) -> None:
    settings = recall_settings(path, tasks=("niah_single_2",), samples=1)
    assert "the prose is made up" in Recall(settings, results(), Quiet()).notes[0]
    own = replace(settings, prose=NamedText("a.txt", "It was late. " * 9))
    assert "prose" not in " ".join(Recall(own, results(), Quiet()).notes)


def test_refused_recall(path: Path) -> None:
    with pytest.raises(SettingsError, match="--tokens 2000 is more than the 1024"):
        Recall(recall_settings(path, tokens=(2000,)), results(), Quiet())
    with pytest.raises(SettingsError, match="there is no task 'x'"):
        Recall(recall_settings(path, tasks=("x",)), results(), Quiet())
