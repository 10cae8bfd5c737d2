"""Recall on tiny random models: prompts, answers and what they sum up to."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measured import Quiet, results, without_times
from pyh2o.errors import SettingsError
from research.eval import recall as recall_module
from research.eval.caches import Compute, open_llama
from research.eval.measurement import CacheSettings
from research.eval.metrics import share_within
from research.eval.model import NamedText
from research.eval.prompts import Prompter
from research.eval.reading import answer_surprises, spans_recalled
from research.eval.recall import Recall, RecallSettings, answered
from research.eval.samples import Question, Sample
from research.eval.tasks import task_named
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
    question = Question("\nWhat is it?", " It is", ("one", "two"), ("A fact",), rival=" three")
    sample = Sample("Some text. A fact.", (question,))
    with tiny_llama(chat_path if is_chat else path, n_ctx=512) as llm:
        prompter = Prompter(llm)
        prompt = prompter.prompt(sample)
        assert prompter.is_chat == is_chat

        def text(tokens: list[int]) -> str:
            return llm.detokenize(tokens, special=True).decode()

        assert text(prompt.context).endswith("Some text. A fact.\n")
        (turn,) = prompt.turns
        rest = text(turn.read)
        if is_chat:
            words = "What is it?<|im_end|> <|im_start|> assistant It is"
            assert " ".join(rest.split()) == words
            assert text(prompt.context).startswith("<s>") or "<|im_start|>" in text(prompt.context)
        else:
            assert rest.strip().replace("  ", " ") == "What is it? It is"
            assert prompt.context[0] == llm.token_bos()
        assert text(turn.answer).strip() == "one, two"
        assert text(turn.rival).strip() == "three"
        ((start, end),) = turn.places
        assert text(prompt.context[start:end]).strip() == "A fact"
        assert prompt.n_tokens == len(prompt.context) + len(turn.read)
        other = prompter.prompt(replace(sample, questions=(replace(question, text="\nWho?"),)))
        assert other.context == prompt.context


@pytest.mark.parametrize("is_chat", [True, False])
def test_later_question_stands_behind_the_right_answer(
    path: Path, chat_path: Path, is_chat: bool
) -> None:
    questions = tuple(
        Question(f"\nWhat is {name}?", f" {name} is", (value,), (f"{name}={value}",))
        for name, value in (("a", "one"), ("b", "two"))
    )
    sample = Sample("b=two a=one", questions)
    with tiny_llama(chat_path if is_chat else path, n_ctx=512) as llm:
        prompt = Prompter(llm).prompt(sample)
        first, second = prompt.turns
        words = " ".join(llm.detokenize(second.read, special=True).decode().split())
        if is_chat:
            expected = "<|im_end|> <|im_start|> user What is b?<|im_end|> <|im_start|> assistant"
            assert words == f"one{expected} b is"
        else:
            assert words == "one What is b? b is"
        assert second.read[: len(first.answer)] == first.answer
        assert second.answer != first.answer
        pieces = [
            llm.detokenize(prompt.context[start:end], special=True).decode().strip()
            for turn in prompt.turns
            for start, end in turn.places
        ]
        assert pieces == ["a=one", "b=two"]


@pytest.mark.parametrize("is_chat", [True, False])
def test_questions_that_are_asked_apart_stand_behind_the_text(
    path: Path, chat_path: Path, is_chat: bool
) -> None:
    questions = tuple(
        Question(f"\nWhat is {name}?", f" {name} is", (value,), (f"{name}={value}",))
        for name, value in (("a", "one"), ("long name", "two"))
    )
    sample = Sample("b=two a=one", questions, apart=True)
    with tiny_llama(chat_path if is_chat else path, n_ctx=512) as llm:
        prompter = Prompter(llm)
        prompt = prompter.prompt(sample)
        alone = [prompter.prompt(replace(sample, questions=(one,))) for one in questions]
        for turn, other in zip(prompt.turns, alone, strict=True):
            assert [*prompt.context, *turn.read] == [*other.context, *other.turns[0].read]
            assert turn.answer == other.turns[0].answer
        assert prompt.n_tokens == max(one.n_tokens for one in alone)
        assert prompter.prompt(sample.longest).n_tokens == prompt.n_tokens
        assert sample.longest.questions == questions[1:]
        chained = replace(sample, apart=False)
        assert chained.longest == chained
        assert prompter.prompt(chained).n_tokens > prompt.n_tokens


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
        assert unit["recall"] == (unit["rows"] and 18)
        (one,) = unit["answers"]
        assert one["answer"]
        found = [reference.lower() in one["answer"].lower() for reference in one["references"]]
        assert one["score"] == sum(found) / len(found)
        assert one["wrong"] is one["margin"] is one["overlap"] is None
        if unit["cache"] == "full":
            assert one["found"] is one["attention"] is None
        else:
            assert 0 < one["attention"] < 1
            assert one["found"] is not None or unit["task"] == "fwe"
    by_cache = {(one.cache, one.question): one for one in summaries if one.task == "all"}

    def losses(*of: str) -> list[float]:
        return [
            unit["answers"][0]["nll"]
            for unit in units.values()
            if (unit["cache"], unit["question"]) == of
        ]

    full = losses("full", "")
    for (cache, question), one in by_cache.items():
        own = losses(cache, question)
        assert one.samples == len(own) == 4
        assert one.nll == pytest.approx(np.mean(own))
        if cache != "full":
            difference = np.array(own) - full
            assert one.nll_to_full == pytest.approx(difference.mean())
            assert one.nll_to_full_error == pytest.approx(difference.std(ddof=1) / 2)
    # eviction changes what is expected, and not the same way in both settings
    assert len({one.nll for one in by_cache.values()}) == 3


@pytest.mark.parametrize(("model", "tokens"), [("path", 900), ("chat_path", 2500)])
def test_questions_of_one_text_are_asked_as_if_each_text_ended_there(
    model: str, tokens: int, request: pytest.FixtureRequest
) -> None:
    """An answer leaves no trace: the second question is asked as if the first answer was right."""
    path = request.getfixturevalue(model)
    caches = CacheSettings(("h2o",), (150,), 0.5, recalls=(0,))
    settings = recall_settings(path, tasks=("pairs",), samples=1, tokens=(tokens,), caches=caches)
    recall = Recall(settings, file := results(), Quiet())
    recall.run()
    (sample, prompt) = recall._samples["pairs", tokens, 0]
    cache = settings.caches.for_text(tokens)[1]
    full = file.units[f"pairs/{tokens}/any/full/0"]["answers"]
    compute = settings.compute
    for when, prefill in (("after", "stream"), ("before", "exact")):
        answers = file.units[f"pairs/{tokens}/{when}/h2o, 150 rows, no recall/0"]["answers"]
        assert [one["references"] for one in answers] == [
            list(one.references) for one in sample.questions
        ]
        read: list[int] = []
        for number, turn in enumerate(prompt.turns):
            read += turn.read
            with open_llama(path, cache, window=tokens, compute=compute, prefill=prefill) as llm:
                if when == "after":
                    llm.eval(prompt.context)
                    llm.eval(read[:-1])
                else:
                    llm.eval([*prompt.context, *read[:-1]])
                loss = answer_surprises(llm, read[-1], turn.answer).mean()
            assert answers[number]["nll"] == pytest.approx(loss, abs=1e-3)
            assert answers[number]["nll"] != pytest.approx(full[number]["nll"], abs=1e-3)
    (table, by_question) = recall.tables(recall.summaries())
    assert table.headings[-1] == "NLL - full"
    assert by_question.title == f"pairs, {tokens:,} tokens, score of each question"
    assert by_question.headings == ("cache", "question", *(f"question {i}" for i in range(1, 6)))


def test_wrong_answers_and_passages_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = recall_settings(path, tasks=("updated",), samples=2, questions=("after",))
    recall = Recall(settings, file := results(), Quiet())
    (place,) = recall._samples["updated", 900, 0][1].turns[0].places
    looked_for = []

    def share(places: list[tuple[int, int]], spans: object, before: int) -> float:
        looked_for.append(places)
        assert 0 < before < 900
        return float(len(looked_for) < 2)

    monkeypatch.setattr(recall_module, "share_within", share)
    recall.run()
    assert len(looked_for) == 2
    assert looked_for[0] == [place]
    of_h2o = [file.units[f"updated/900/after/h2o, 150 rows/{i}"]["answers"][0] for i in range(2)]
    assert [one["found"] for one in of_h2o] == [1.0, 0.0]
    assert [one["wrong"] for one in of_h2o] == [False, False]
    (_, one) = recall.summaries()
    assert (one.wrong, one.found) == (0.0, 0.5)
    assert one.margin == pytest.approx(np.mean([of["margin"] for of in of_h2o]))
    assert one.margin != 0
    (table,) = recall.tables(recall.summaries())
    assert table.headings[-4:] == (
        *("wrong answer given", "NLL of the wrong one - right one"),
        *("passage found", "attention found"),
    )


def test_evicted_rows_are_found_for_each_question(path: Path) -> None:
    caches = CacheSettings(("h2o",), (80,), 0.5, recalls=(0, 20))
    settings = recall_settings(path, tasks=("pairs",), samples=1, caches=caches)
    recall = Recall(settings, file := results(), Quiet())
    recall.run()

    def answers(when: str, cache: str) -> list[dict[str, Any]]:
        return file.units[f"pairs/900/{when}/{cache}/0"]["answers"]

    for when in ("after", "before"):
        without = answers(when, "h2o, 80 rows, no recall")
        finding = answers(when, "h2o, 80 rows, recall 20 rows")
        assert {(one["found"], one["attention"]) for one in without} == {(None, None)}
        assert all(0 < one["attention"] < 1 for one in finding)
        assert [one["nll"] for one in finding] != [one["nll"] for one in without]
    # by hand
    sample, prompt = recall._samples["pairs", 900, 0]
    cache = caches.for_text(900)[2]
    with open_llama(path, cache, window=900, compute=settings.compute) as llm:
        llm.eval(prompt.context)
        unread: list[int] = []
        of_cache = answers("after", cache.name)
        for question, turn, told in zip(sample.questions, prompt.turns, of_cache, strict=True):
            unread += turn.read
            llm.read(unread[:-1])
            unread = unread[-1:]
            passages = spans_recalled(llm)
            assert passages
            one = answered(llm, task_named("pairs"), question, turn)
            assert asdict(one) == told
            if share_within(turn.places, passages, before=llm.kv.archived):
                assert one.found
            loss = answer_surprises(llm, unread[0], turn.answer).mean()
            assert one.nll == pytest.approx(loss, abs=1e-4)
    table = recall.tables(recall.summaries())[0]
    assert [row[1] for row in table.rows][1:] == 2 * ["80 (256)"] + 2 * ["60 (256) + 20"]


def test_recall_of_a_budget_that_covers_the_text_is_the_full_cache_s(path: Path) -> None:
    caches = CacheSettings(("h2o",), (900,), 0.5, recalls=(0,))
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
    del file.units["fwe/900/any/full/0"]["answers"][0]["score"]
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
