"""Dialogues: what is said and asked, and how caches answer."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from measured import Quiet, results, without_times
from pyh2o.errors import SettingsError
from research.eval import talks
from research.eval.caches import Compute, open_llama
from research.eval.dialogue import TASK, Dialogue, DialogueSettings
from research.eval.measurement import CacheSettings
from research.eval.metrics import first_sentence, overlap
from research.eval.reading import answer_surprises
from research.eval.samples import Question, Sample
from research.eval.words import Prose

PROSE = Prose(None)
TRAINED, TOKENS = 4096, 4090


def dialogue(seed: int, tokens: int = 20_000, size: int = 5000) -> Sample:
    return talks.build(size, tokens, random.Random(seed), PROSE)


def of_kind(sample: Sample, kind: str) -> list[Question]:
    return [one for one in sample.questions if one.kind == kind]


def sessions(sample: Sample) -> list[tuple[datetime, str]]:
    """Date and lines of each session."""
    parts = re.split(r"\[Session \d+, (\d+ \w+ \d+)\]\n", sample.context)[1:]
    dates = [datetime.strptime(one, "%d %B %Y") for one in parts[::2]]
    return list(zip(dates, parts[1::2], strict=True))


# -------------------------------------------------------------------------------------------------
# What is said
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_is_in_the_dialogue_once(seed: int) -> None:
    sample = dialogue(seed)
    kinds = Counter(one.kind for one in sample.questions)
    assert kinds == dict.fromkeys(talks.KINDS, talks.EACH)
    assert sample.apart
    assert "{" not in sample.context
    for question in sample.questions:
        assert "{" not in question.text + question.prefix
        assert [sample.context.count(place) for place in question.places] == [1] * len(
            question.places
        )
        (answer,) = question.references
        if question.kind not in ("date", "absent"):
            assert answer in question.places[-1]
        assert (question.places == ()) == (question.kind == "absent")
        assert not question.is_wrong(question.answer)
        assert question.is_wrong(question.rival)
        assert question.score(question.answer) == 1


def test_people_take_turns_in_sessions_with_dates() -> None:
    sample = dialogue(1)
    found = sessions(sample)
    assert len(found) == 20_000 // talks.SESSION_TOKENS
    days = [(b[0] - a[0]).days for a, b in pairwise(found)]
    assert all(talks.DAYS_APART[0] <= one <= talks.DAYS_APART[1] for one in days)
    people = re.match(r"Below are conversations between (\w+) and (\w+),", sample.context)
    assert people is not None
    for _, lines in found:
        speakers = [line.split(": ")[0] for line in lines.strip().split("\n")]
        assert set(speakers) == set(people.groups())
        # nobody says more than three things before the other one answers
        assert not re.search(r"(\w+ )\1\1\1", " ".join([*speakers, ""]))


def test_latest_of_what_changed_counts() -> None:
    for seed in range(20):
        sample = dialogue(seed)
        for question in of_kind(sample, "change"):
            (place,), (new,) = question.places, question.references
            before, after = (re.escape(part) for part in place.split(new))
            said = re.findall(f"{before}(.+?){after}", sample.context)
            assert len(said) in (2, 3)
            assert [said[-1], f" {said[-2]}"] == [new, question.rival]


def test_days_between_two_events() -> None:
    for seed in range(20):
        sample = dialogue(seed)
        for question in of_kind(sample, "date"):
            first, second = (
                next(day for day, lines in sessions(sample) if place in lines)
                for place in question.places
            )
            assert question.references == (str((second - first).days),)
            assert (second - first).days > 0


def test_joined_facts_are_told_by_both() -> None:
    sample = dialogue(3)
    for question in of_kind(sample, "joined"):
        called, done = question.places
        lines = sample.context.split("\n")
        tellers = [
            next(line.split(": ")[0] for line in lines if line.endswith(f": {place}"))
            for place in (called, done)
        ]
        assert len(set(tellers)) == 2
        assert tellers[0] in question.text
        name = called.split()[-1].rstrip(".")
        assert name in done
        assert name not in question.text + question.prefix
        # somebody else has done something of the kind
        other = done.replace(question.references[0], question.rival.strip())
        assert len(re.findall(re.sub(rf"\b{name}\b", r"\\w+", re.escape(other)), "".join(lines)))


def test_what_was_never_said_was_said_by_the_other_one() -> None:
    sample = dialogue(4)
    people = re.findall(r"between (\w+) and (\w+),", sample.context)[0]
    for question in of_kind(sample, "absent"):
        (who,) = [one for one in people if one in question.text]
        topic = next(one for one in talks._FACTS if one.asked.format(who=who) in question.text)
        before, after = map(re.escape, topic.said.split("{value}"))
        ((teller, value),) = re.findall(rf"\n(\w+): {before}(.+){after}\n", sample.context)
        assert teller in people
        assert teller != who
        assert question.rival == f" {value}"
        assert question.references == (talks.REFUSAL,)


def test_more_words_change_nothing_but_what_is_said_besides() -> None:
    short, long = dialogue(5, size=1), dialogue(5)
    assert short.questions == long.questions
    more = len(long.context.split()) - len(short.context.split())
    assert more >= 4999 + len(sessions(long))
    assert dialogue(6).questions != long.questions


def test_sentences_of_ones_own_text() -> None:
    prose = Prose("It rained. The cat slept! Was it night?")
    sample = talks.build(300, 4000, random.Random(1), prose)
    assert len(re.findall(r"\w+: The cat slept!\n", sample.context)) > 30


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Pumpkin curry.", 1.0),
        ("pumpkin curry, I think. It is good", 2 * 2 / (4 + 2)),
        ("the curry", 2 / 3),
        ("risotto", 0.0),
        ("", 0.0),
    ],
)
def test_overlap_of_the_first_sentence(answer: str, expected: float) -> None:
    assert overlap(" pumpkin curry", first_sentence(answer)) == pytest.approx(expected)


def test_first_sentence() -> None:
    assert first_sentence(" 3.5 tons! More") == "3.5 tons"
    assert first_sentence("one\ntwo.") == "one"
    assert first_sentence("") == ""


# -------------------------------------------------------------------------------------------------
# What caches answer
# -------------------------------------------------------------------------------------------------


def dialogue_settings(path: Path, **changes: Any) -> DialogueSettings:
    settings = DialogueSettings(
        model=path,
        compute=Compute(threads=1),
        tokens=(TOKENS,),
        samples=1,
        caches=CacheSettings(("h2o",), (200,), 0.5, recalls=(0, 64)),
    )
    return replace(settings, **changes)


def test_dialogue(chat_path: Path, tmp_path: Path) -> None:
    progress, target = Quiet(), tmp_path / "a.json"
    measured = Dialogue(dialogue_settings(chat_path), results(target), progress)
    measured.run()
    assert progress.planned == progress.done == 3 * TOKENS
    units = json.loads(target.read_text())["units"]
    names = ["full", "h2o, 200 rows, no recall", "h2o, 200 rows, recall 64 rows"]
    assert list(units) == [f"dialogue/{TOKENS}/any/{name}/0" for name in names]
    summaries = measured.summaries()
    assert [(one.task, one.cache) for one in summaries] == [
        (kind, name) for kind in (*talks.KINDS, "all") for name in names
    ]
    for one in summaries:
        answers = [
            answer
            for answer in units[f"dialogue/{TOKENS}/any/{one.cache}/0"]["answers"]
            if one.task in ("all", answer["kind"])
        ]
        assert one.samples == len(answers) == (20 if one.task == "all" else talks.EACH)
        for name in ("nll", "overlap"):
            mean = sum(answer[name] for answer in answers) / len(answers)
            assert getattr(one, name) == pytest.approx(mean)
        assert (one.nll_to_full is None) == (one.cache == "full")
        assert (one.attention is None) == (one.recall == 0)
        if one.task == "absent" or not one.recall:
            assert one.found is None
    table = measured.tables(summaries)[-1]
    assert table.title == f"all tasks, {TOKENS:,} tokens, 20 questions"
    assert "question" not in table.headings
    assert {"overlap", "attention found", "passage found"} <= set(table.headings)


def test_questions_are_asked_of_the_same_text(chat_path: Path) -> None:
    """Whatever was asked and answered before."""
    caches = CacheSettings(("h2o",), (200,), 0.5, recalls=(0,))
    settings = dialogue_settings(chat_path, caches=caches)
    measured = Dialogue(settings, file := results(), Quiet())
    measured.run()
    _, prompt = measured._samples[TASK.name, TOKENS, 0]
    cache = caches.for_text(TOKENS)[1]
    answers = file.units[f"dialogue/{TOKENS}/any/{cache.name}/0"]["answers"]
    for number in (7, 19):
        turn = prompt.turns[number]
        with open_llama(chat_path, cache, window=TOKENS, compute=settings.compute) as llm:
            llm.eval(prompt.context)
            llm.eval(turn.read[:-1])
            loss = answer_surprises(llm, turn.read[-1], turn.answer).mean()
        assert answers[number]["nll"] == pytest.approx(loss, abs=1e-3)


def test_dialogues_are_the_same_in_every_run_and_for_every_cache(chat_path: Path) -> None:
    caches = CacheSettings(("h2o",), (200,), 0.5)
    settings = dialogue_settings(chat_path, tokens=(5000,), caches=caches)
    files = [results(), results()]
    for file in files:
        Dialogue(settings, file, Quiet()).run()
    assert without_times(files[0].units) == without_times(files[1].units)
    other = Dialogue(replace(settings, seed=1), results(), Quiet())
    sample, _ = other._samples[TASK.name, 5000, 0]
    references = [one["references"] for unit in files[0].units.values() for one in unit["answers"]]
    assert references != [list(one.references) for one in sample.questions]


def test_dialogue_beyond_the_trained_context_has_no_full_cache(chat_path: Path) -> None:
    settings = dialogue_settings(chat_path, tokens=(TOKENS, TRAINED + 500))
    measured = Dialogue(settings, results(), Quiet())
    assert f"dialogues of more than the {TRAINED} tokens" in " ".join(measured.notes)
    told = [(job.tokens, job.cache.is_full) for job in measured.wanted()]
    assert told == [(TOKENS, True), *[(TOKENS, False)] * 2, *[(TRAINED + 500, False)] * 2]
    short = Dialogue(replace(settings, tokens=(TOKENS,)), results(), Quiet())
    assert "full cache to be compared" not in " ".join(short.notes)


def test_dialogue_without_room(chat_path: Path) -> None:
    with pytest.raises(SettingsError, match="--tokens 300 has no room for a sample of dialogue"):
        Dialogue(dialogue_settings(chat_path, tokens=(300,)), results(), Quiet())
