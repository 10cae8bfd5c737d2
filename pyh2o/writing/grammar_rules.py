"""The rules of a grammar, read to find what llama.cpp would never come to an end with.

It goes all ways through a grammar at once, and writes down where each of them is. A rule that
begins with itself behind something that may be empty has ways without end, and llama.cpp notices
only some of these rules. Something that may be empty, many times in a row, has more ways than
anybody waits for.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from ..errors import GrammarError

# Times in a row of something that may be empty: 16 take milliseconds, 24 half a second, 32 minutes.
MOST_EMPTY = 16
# Ways to go on that a grammar may have beyond its elements: 256 to one word take 15 s a token.
MOST_WAYS = 256
# Of what may be empty, in all rules: so many take this check a second.
MOST_COUNTED = 1_000_000
# A larger number is for llama.cpp as if there were none.
MOST_REPETITIONS = 2000

_SIGNS = re.compile(
    r"""(?P<nothing>(?:[ \t\r\n]|\#[^\r\n]*)+)
      | (?P<rule>[a-zA-Z0-9-]+)(?:[ \t]|\#[^\r\n]*)*::=
      | (?P<name>[a-zA-Z0-9-]+)
      | (?P<empty>""|\[\^?\])
      | (?P<terminal>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|!?<[^>]*>|\.)
      | (?P<times>[*+?]|\{[^}]*\})
      | (?P<sign>[()|])""",
    re.VERBOSE | re.DOTALL,
)
_NOTHING = re.compile(r"\s|#[^\r\n]*")
_TIMES = re.compile(r"\{(\d+)(,?)(\d*)\}")


@dataclass
class _Element:
    """A rule or, without a name, a terminal; so often in a row, `most` None for without an end."""

    rule: str | None
    least: int = 1
    most: int | None = 1


_Rules = dict[str, list[list[_Element]]]
_Counts = Counter[str | int]


def check_rules(grammar: str, root: str) -> None:
    """Refuse a grammar that llama.cpp would not come to an end with; others it may still refuse.

    Raises:
        GrammarError: it is one, or it cannot be read.
    """
    rules = _read(grammar, root)
    used = {each.rule for sequences in rules.values() for each in itertools.chain(*sequences)}
    if not {root, *used} <= {None, *rules}:
        raise unreadable(root)  # or llama.cpp would print all of it
    may_be_empty = _rules_that_may_be_empty(rules)
    begun_with = {
        name: {
            element.rule
            for sequence in sequences
            for element in _beginning(sequence, may_be_empty)
            if element.rule in rules
        }
        for name, sequences in rules.items()
    }
    try:
        order = list(TopologicalSorter(begun_with).static_order())
    except CycleError:
        raise unreadable(root) from None
    _check_beginnings(rules, order, may_be_empty)


def unreadable(root: str) -> GrammarError:
    """What is said of a grammar that cannot be read."""
    return GrammarError(
        f"the grammar cannot be read: each rule has the form 'name ::= ...', every bracket is "
        f"closed, no rule begins with itself, and {root!r} is one of them"
    )


def _read(grammar: str, root: str) -> _Rules:
    """The rules by name; what stands in brackets is one, too."""
    rules: _Rules = {}
    opened: list[str] = []  # the rule that is read, and the brackets in it
    last: _Element | None = None  # that a repetition would be of
    at = 0
    while at < len(grammar):
        found = _SIGNS.match(grammar, at)
        if found is None or (found.lastgroup not in ("nothing", "rule") and not opened):
            raise unreadable(root)
        at, sign = found.end(), found[0]
        sequences = rules[opened[-1]] if opened else [[]]
        if found.lastgroup == "rule":
            opened, last = [found["rule"]], None
            rules[opened[0]] = [[]]
        elif found.lastgroup in ("name", "terminal") or sign == "(":
            name = f"({at}" if sign == "(" else found["name"]
            last = _Element(name)
            sequences[-1].append(last)
            if sign == "(":
                opened.append(name)
                rules[name] = [[]]
                last = None
        elif sign == ")":
            opened.pop()
            if not opened:
                raise unreadable(root)
            last = rules[opened[-1]][-1][-1]
        elif sign == "|":
            sequences.append([])
            last = None
        elif found.lastgroup == "empty":
            last = None
        elif found.lastgroup == "times":
            if last is None:
                raise unreadable(root)
            if (last.least, last.most) != (1, 1):  # repeated already
                rules[f"({at}"] = [[_Element(last.rule, last.least, last.most)]]
                last.rule = f"({at}"
            last.least, last.most = _times(sign, root)
    return rules


def _times(sign: str, root: str) -> tuple[int, int | None]:
    """The least and the most times that a sign of repetition stands for."""
    if sign in "*+?":
        return int(sign == "+"), 1 if sign == "?" else None
    found = _TIMES.fullmatch(_NOTHING.sub("", sign))
    if found is None:
        raise unreadable(root)
    least, most = int(found[1]), int(found[3] or found[1])
    if (found[2] and not found[3]) or most > MOST_REPETITIONS:
        return least, None
    if most < least:
        raise GrammarError(
            f"the grammar repeats something {{{least},{most}}} times: put the smaller number first"
        )
    return least, most


def _rules_that_may_be_empty(rules: _Rules) -> set[str]:
    """The rules that allow an empty text."""
    users: dict[str, list[tuple[str, int]]] = defaultdict(list)
    n_left: dict[tuple[str, int], int] = {}  # elements of a sequence that may not be empty
    found: list[str] = []
    for name, sequences in rules.items():
        for i, sequence in enumerate(sequences):
            needed = [element.rule for element in sequence if element.least > 0]
            n_left[name, i] = len(needed)
            for rule in needed:
                if rule is not None:
                    users[rule].append((name, i))
            if not needed:
                found.append(name)
    empty: set[str] = set()
    while found:
        name = found.pop()
        if name not in empty:
            empty.add(name)
            for user in users[name]:
                n_left[user] -= 1
                if n_left[user] == 0:
                    found.append(user[0])
    return empty


def _beginning(
    sequence: list[_Element], may_be_empty: set[str], start: int = 0
) -> Iterator[_Element]:
    """The elements that a text can begin with at a place in a sequence."""
    for i in range(start, len(sequence)):
        element = sequence[i]
        yield element
        if element.least > 0 and element.rule not in may_be_empty:
            return


def _check_beginnings(rules: _Rules, order: list[str], may_be_empty: set[str]) -> None:
    """Refuse what has too many beginnings; in `order` a rule comes behind those it begins with."""
    n_elements = sum(len(sequence) for sequences in rules.values() for sequence in sequences)
    n_ways: dict[str | None, int] = defaultdict(lambda: 1)
    empty: dict[str | None, _Counts] = defaultdict(Counter)
    n_counted = 0

    def count(sequence: list[_Element], start: int) -> tuple[int, _Counts]:
        """Ways to begin at a place, and how often each thing that may be empty is among them."""
        n, found = 0, _Counts()
        for element in _beginning(sequence, may_be_empty, start):
            times = 1
            if element.rule in may_be_empty:
                times = element.least + 1 if element.most is None else element.most
            n += times * n_ways[element.rule]
            for key, n_times in empty[element.rule].items():
                found[key] += n_times * times
            if element.least == 0:
                found[id(element)] += times
        if max(found.values(), default=0) > MOST_EMPTY:
            raise GrammarError(
                "the grammar repeats something that may be empty: let it have at least one "
                f"character, or come at most {MOST_EMPTY} times in a row"
            )
        if n > n_elements + MOST_WAYS or n_counted > MOST_COUNTED:
            raise GrammarError(
                "the grammar has too many ways to go on: write what several alternatives of a "
                "rule begin with once, before them"
            )
        return n, found

    for name in order:
        counted = [count(sequence, 0) for sequence in rules[name]]
        n_ways[name] = sum(n for n, _ in counted)
        empty[name] = sum((found for _, found in counted), _Counts())
        if [] in rules[name]:
            empty[name][name] += 1
        n_counted += len(empty[name])
    for sequence in (each for sequences in rules.values() for each in sequences):
        for i, element in enumerate(sequence[:-1]):
            if element.least > 0 and element.rule not in may_be_empty:
                count(sequence, i + 1)
