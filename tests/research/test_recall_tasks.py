"""Samples of the recall tasks, and what counts as an answer."""

from __future__ import annotations

import random
import re
from collections import Counter
from uuid import UUID

import pytest

from research.eval import counting
from research.eval.samples import Sample, string_match_all
from research.eval.tasks import TASKS
from research.eval.words import Prose

MADE_UP = Prose(None)
LONG = 4096


def words_in(sample: Sample) -> int:
    """A model without a tokenizer: each word or mark is a token."""
    return len(re.findall(r"\w+|\S", sample.context + sample.question + sample.prefix))


def sample_of(name: str, tokens: int = LONG, index: int = 0, seed: int = 0) -> Sample:
    task = TASKS[name]
    return task.sample(
        index, tokens, seed, MADE_UP, lambda one: words_in(one) + task.answer_tokens <= tokens
    )


@pytest.mark.parametrize("tokens", [1024, LONG])
@pytest.mark.parametrize("name", TASKS)
def test_sample_has_its_answer_inside_and_fits_closely(name: str, tokens: int) -> None:
    for index in range(2):
        sample = sample_of(name, tokens, index)
        assert sample.references
        assert all(reference in sample.context for reference in sample.references)
        assert len(set(sample.references)) == len(sample.references)
        assert all(sample.context.count(place) == 1 for place in sample.places)
        assert sample.prefix == sample.prefix.rstrip()
        room = tokens - TASKS[name].answer_tokens - words_in(sample)
        # What one unit more would take: the steps of fwe are tokens / 32 words.
        assert 0 <= room < 40 + tokens / 10


@pytest.mark.parametrize("name", TASKS)
def test_samples_depend_on_their_number_and_the_seed_alone(name: str) -> None:
    first = sample_of(name, 1024)
    assert sample_of(name, 1024) == first
    assert sample_of(name, 1024, index=1) != first
    assert sample_of(name, 1024, seed=1) != first


def test_string_match_all() -> None:
    references = ("Alpha", "beta", "42")
    assert string_match_all("it is ALPHA, and BETA", references) == 2 / 3
    assert string_match_all("", references) == 0.0
    assert string_match_all("42 beta alpha", references) == 1.0


NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


@pytest.mark.parametrize(
    ("name", "n_needles", "n_references"),
    [
        ("niah_single_1", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_and_what_is_asked(name: str, n_needles: int, n_references: int) -> None:
    sample = sample_of(name)
    needles = NEEDLE.findall(sample.context)
    assert len(needles) == n_needles
    assert len(sample.references) == n_references
    values = [value for _, key, value in needles if key in sample.question]
    assert set(values) == set(sample.references)
    assert [place.split(" is: ")[1] for place in sample.places] == list(sample.references)


@pytest.mark.parametrize(
    ("name", "kind"), [("niah_multikey_2", "numbers"), ("niah_multikey_3", "uuids")]
)
def test_haystack_of_needles(name: str, kind: str) -> None:
    sample = sample_of(name)
    needles = [NEEDLE.fullmatch(line) for line in sample.context.splitlines()[1:]]
    found = [needle.groups() for needle in needles if needle is not None]
    assert len(found) == len(needles) > 50
    assert {one for one, _, _ in found} == {kind}
    for part in (1, 2):
        assert len({needle[part] for needle in found}) == len(found)
    (answer,) = [value for _, key, value in found if key in sample.question]
    assert sample.references == (answer,)
    if kind == "uuids":
        assert all(UUID(key).version == UUID(value).version == 4 for _, key, value in found)


def test_variables_can_be_traced() -> None:
    sample = sample_of("vt")
    example, text = sample.context.rsplit("Memorize and track", 1)
    value = re.search(r"assigned the value (\d{5}) in", sample.question)
    assert value is not None
    chain = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE)
    assert [name for name, _ in chain] == list(sample.references)
    assert [source for _, source in chain] == [value[1], *sample.references[:-1]]
    assert len(sample.places) == len(chain)
    assert value[1] not in example  # the worked example has names of its own


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(1024, 6, 1), (LONG, 30, 3)])
def test_common_words_are_the_most_common(tokens: int, often: int, seldom: int) -> None:
    sample = sample_of("cwe", tokens)
    listed = sample.context.rsplit("Memorize the ones that appear most often.\n", 1)[1]
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert {word for word, count in counts.items() if count == often} == set(sample.references)
    assert set(counts.values()) == {often, seldom}


@pytest.mark.parametrize("tokens", [512, LONG])
def test_frequent_words_come_by_a_zeta_distribution(tokens: int) -> None:
    sample = sample_of("fwe", tokens)
    words = sample.context.split("coded words. ")[1].split()
    ranked = Counter(words).most_common()
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == list(sample.references)
    assert ranked[3][1] > ranked[4][1]
    assert ranked[0][1] / ranked[1][1] == pytest.approx(4, rel=0.1)


def test_fewest_frequent_words_are_told_apart() -> None:
    for tokens in (64, 1024, 32768):
        least = counting.frequent_least(tokens)
        sample = counting.build_frequent(least, tokens, random.Random(0), MADE_UP)
        counts = Counter(sample.context.split("coded words. ")[1].split())
        references = sample.references
        ranked = [counts[word] for word in references]
        others = [counts[word] for word in counts if word not in (*references, "...")]
        assert min(ranked) > max(others, default=0)
