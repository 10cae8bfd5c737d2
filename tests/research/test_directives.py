"""The instructions with their checks, and the messages of a dialogue."""

from __future__ import annotations

from collections import Counter

import pytest

from research.eval import directives


@pytest.mark.parametrize(
    "directive", [*directives.DIRECTIVES, directives.defence("tulip-123")], ids=lambda one: one.name
)
def test_canned_answers_are_what_they_are_said_to_be(directive: directives.Directive) -> None:
    assert directive.followed(directive.compliant)
    assert not directive.followed(directive.violating)


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("lower case", "a b 1!", True),
        ("last words", 'Well. Have a good day!"\n', True),
        ("last words", "have a good day, and more", False),
        ("first word", ' "Certainly, yes.', True),
        ("first word", "I am certainly", False),
        ("keyword", "Take an Umbrella.", True),
        ("keyword", "umbrellas", False),
        ("few sentences", "One. Two! Three?", True),
        ("few sentences", "At 3.5 km. Two. Three.", True),
        ("few sentences", "One. Two. Three. Four", True),  # the last one is not finished
        ("few sentences", "One. Two. Three. Four.", False),
        ("no lists", "a - b", True),
        ("no lists", "So:\n  - a", False),
    ],
)
def test_checks(name: str, answer: str, expected: bool) -> None:
    (directive,) = [one for one in directives.DIRECTIVES if one.name == name]
    assert directive.followed(answer) == expected


def test_system_prompts() -> None:
    prompts = [directives.assignment(index, 5, 4) for index in range(4)]
    assert [one.defence_first for one in prompts] == [True, False, True, False]
    for one in prompts:
        names = [directive.name for directive in one.directives]
        assert names.index("defence") == (0 if one.defence_first else 4)
        assert len(set(names)) == 5
        assert all(directive.text in one.system for directive in one.directives)
        assert one.secret in one.system
        assert len(one.system) < len(directives.longest_system())
        others = " ".join(directive.text for directive in directives.DIRECTIVES)
        assert one.secret.split("-")[0] not in others.lower().split()
    assert len({one.system for one in prompts}) == 4
    assert directives.assignment(2, 5, 4).system == prompts[2].system


def test_messages_are_as_many_as_turns() -> None:
    said = directives.messages(0, 0, 100)
    assert len(said) == 100
    assert Counter(said[:80]) == dict.fromkeys(directives.MESSAGES, 2)
    assert directives.messages(0, 0, 3) == said[:3]
    assert directives.messages(1, 0, 100) != said
