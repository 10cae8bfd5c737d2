"""Translates llama.cpp's GBNF to Lark, for llguidance.

The formats have similar rules, so a grammar is translated token by token. Three things differ:

* llguidance splits a text into lexemes, each as long as possible. A rule without recursion that
  has an unbounded repetition, such as `[a-z]+`, becomes one lexeme (a "terminal"), which is fast.
  Everything else becomes lexemes of one character, which is exact.
* A special token is not text. If a literal contains the text of one, the token may replace it.
* Right-recursive rules need memory quadratic in the text. They are rewritten as left-recursive.

llguidance's own `gbnf_to_lark` does not support tokens (`<[12]>`) and schemas (`%json`), keeps
escapes that Lark cannot parse, and confuses rules whose names differ only in case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from ..errors import GrammarError
from .json_schema import for_llguidance

# A repetition with a higher bound than this becomes one lexeme.
SHORT = 64
# Maximum depth of brackets; Lark has a limit too.
MAX_DEPTH = 60
# Maximum number of mutually right-recursive rules to rewrite.
MAX_REWRITTEN = 200

EMPTY = '""'

_TOKENS = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
      | (?P<rule>[a-zA-Z0-9_-]+)(?:[ \t]|\#[^\r\n]*)*::=
      | (?P<name>[a-zA-Z0-9_-]+)
      | %json[ ](?P<schema>[^\r\n]+)
      | (?P<empty>""|\[\^?\])
      | "(?P<literal>(?:\\.|[^"\\])*)"
      | \[(?P<class>(?:\\.|[^\]\\])*)\]
      | (?P<not>!?)<(?P<token>[^>]*)>
      | (?P<any>\.)
      | (?P<times>[*+?]|\{[\s\d,]*\})
      | (?P<mark>[()|])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\"\\\[\]-]))|([^\\])",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_BOUNDS = re.compile(r"\{(\d+)(,?)(\d*)\}")


class _Name(NamedTuple):
    """A reference to a rule."""

    rule: str


@dataclass
class _Element:
    """A part of an alternative.

    Attributes:
        parts: Lark source and references to rules.
        is_regular: whether it may be part of a terminal: it has no special token and no schema.
        is_long: whether it has a repetition without a bound, or with one above `SHORT`.
        is_group: whether it is bracketed and not repeated.
    """

    parts: list[str | _Name]
    is_regular: bool = True
    is_long: bool = False
    is_group: bool = False

    def repeated(self, times: str, *, is_long: bool) -> _Element:
        inside = self.parts[1:-1] if self.is_group else self.parts
        return _Element(["(", *inside, f"){times}"], self.is_regular, self.is_long or is_long)


_Rule = list[list[_Element]]  # the elements of each alternative
_Rules = dict[str, _Rule]


class Vocabulary(NamedTuple):
    """A model's special tokens.

    Attributes:
        token: returns the token of a text; None if the text is not a single token.
        texts: matches the texts of special tokens; None if there are none.
    """

    token: Callable[[str], int | None]
    texts: re.Pattern[str] | None


def lark_of(grammar: str, root: str, vocabulary: Vocabulary) -> str:
    """Return a grammar in Lark.

    Args:
        grammar: a grammar in GBNF (grammars/README.md of llama.cpp). A rule may also be "%json"
            with a JSON schema in the rest of the line, for its JSON followed by white space.
    """
    rules = _read(grammar, vocabulary)
    used = {name.rule for rule in rules.values() for name in _names(rule)}
    for name in (root, *sorted(used)):
        if name not in rules:
            raise GrammarError(f"undefined rule {name[:40]!r}: add 'name ::= ...'")
    regular, long = _regular_rules(rules)
    rules = _left_recursive(rules, regular)
    numbers = {name: number for number, name in enumerate(rules)}
    lines = ["%llguidance {}"]
    to_write = [(root, root in regular)]
    lines.append("start: " + _written(*to_write[0], numbers))
    seen = set(to_write)
    for rule, is_terminal in to_write:  # the loop appends to it
        words = []
        for alternative in rules[rule]:
            words.append("|")
            for part in (part for element in alternative for part in element.parts):
                if isinstance(part, _Name):
                    reference = (part.rule, is_terminal or part.rule in long)
                    words.append(_written(*reference, numbers))
                    to_write += [reference] if reference not in seen else []
                    seen.add(reference)
                else:
                    words.append(part)
        lines.append(f"{_written(rule, is_terminal, numbers)}: {' '.join(words[1:]) or EMPTY}")
    return "\n".join(lines)


def _written(rule: str, is_terminal: bool, numbers: dict[str, int]) -> str:
    return f"{'T' if is_terminal else 'r'}{numbers[rule]}"


def _names(rule: _Rule) -> Iterator[_Name]:
    for part in (p for alternative in rule for element in alternative for p in element.parts):
        if isinstance(part, _Name):
            yield part


# ---------------------------------------------------------------------------------------------
# Parsing
# ---------------------------------------------------------------------------------------------


def _read(grammar: str, vocabulary: Vocabulary) -> _Rules:
    rules: _Rules = {}
    open_groups: list[_Rule] = []  # the current rule and its open brackets
    at = 0
    while at < len(grammar):
        found = _TOKENS.match(grammar, at)
        kind = found.lastgroup if found else None
        if found is None or kind is None or not (open_groups or kind in ("space", "rule")):
            raise _unreadable(grammar, at)
        if kind == "rule":
            if len(open_groups) > 1:
                raise _unreadable(grammar, at)
            open_groups = [rules.setdefault(found["rule"], [])]
            open_groups[0][:] = [[]]
        elif found[0] == "(":
            if len(open_groups) > MAX_DEPTH:
                raise GrammarError("brackets are nested too deeply: move some into rules")
            open_groups.append([[]])
        elif found[0] == ")":
            group = open_groups.pop()
            if not open_groups:
                raise _unreadable(grammar, at)
            open_groups[-1][-1].append(_group(group))
        elif found[0] == "|":
            open_groups[-1].append([])
        elif kind == "times":
            alternative = open_groups[-1][-1]
            if not alternative:
                raise _unreadable(grammar, at)
            times, is_long = _times(found[0], grammar, at)
            alternative[-1] = alternative[-1].repeated(times, is_long=is_long)
        elif kind != "space":
            element = _element(kind, found, vocabulary)
            if element is None:
                raise _unreadable(grammar, at)
            open_groups[-1][-1].append(element)
        at = found.end()
    if len(open_groups) != 1:
        raise _unreadable(grammar, at)
    return rules


def _unreadable(grammar: str, at: int) -> GrammarError:
    line = grammar.count("\n", 0, at) + 1
    near = grammar[at : at + 20]
    where = f"at {near!r} in line {line}" if near else "at the end"
    return GrammarError(
        f"syntax error {where}: each rule must have the form 'name ::= ...', and all brackets "
        "and quotation marks must be closed"
    )


def _group(group: _Rule) -> _Element:
    parts: list[str | _Name] = []
    for alternative in group:
        parts += ["|", *(part for element in alternative for part in element.parts)]
        parts += [] if alternative else [EMPTY]
    elements = [element for alternative in group for element in alternative]
    return _Element(
        ["(", *parts[1:], ")"],
        all(element.is_regular for element in elements),
        any(element.is_long for element in elements),
        is_group=True,
    )


def _times(text: str, grammar: str, at: int) -> tuple[str, bool]:
    """Return a repetition in Lark, and whether it has no bound or one above `SHORT`."""
    text = "".join(text.split())
    if text in "*+?":
        return text, text != "?"
    bounds = _BOUNDS.fullmatch(text)
    if bounds is None:
        raise _unreadable(grammar, at)
    least, most = int(bounds[1]), int(bounds[3] or bounds[1])
    if most < least:
        raise GrammarError(f"invalid repetition {text}: put the smaller number first")
    has_end = not bounds[2] or bool(bounds[3])
    return f"{{{least},{most if has_end else ''}}}", not has_end or most > SHORT


def _element(kind: str, found: re.Match[str], vocabulary: Vocabulary) -> _Element | None:
    """Return a token as Lark; None if it is invalid."""
    if kind == "name":
        return _Element([_Name(found["name"])])
    if kind == "any":
        return _Element(["/(?s:.)/"])
    if kind == "empty":
        return _Element([EMPTY])
    if kind == "schema":
        try:
            schema = json.loads(found["schema"])
        except ValueError:
            return None
        json_value = f"%json {for_llguidance(schema, is_strict=False)}"
        return _Element([json_value, "( /[ \\t\\n]/ ){0,20}"], is_regular=False)
    if kind == "token":
        return _token(found["token"], bool(found["not"]), vocabulary)
    if kind == "literal":
        text = _characters(found["literal"])
        return None if text is None else _literal("".join(text), vocabulary)
    return _class(found["class"])


def _token(text: str, is_not: bool, vocabulary: Vocabulary) -> _Element | None:
    number = re.fullmatch(r"\[(\d+)\]", text)
    token = int(number[1]) if number else vocabulary.token(f"<{text}>")
    if token is None:
        return None
    return _Element([f"<[{'^' if is_not else ''}{token}]>"], is_regular=False)


def _characters(text: str) -> list[str] | None:
    """Return the characters of a text with escapes; None if an escape is invalid."""
    characters, at = [], 0
    while at < len(text):
        found = _CHARACTER.match(text, at)
        if found is None:
            return None
        at = found.end()
        code = found[1] or found[2] or found[3]
        if code is not None:
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                return None
            characters.append(chr(int(code, 16)))
        else:
            characters.append(found[5] or _CONTROLS.get(found[4], found[4]))
    return characters


def _literal(text: str, vocabulary: Vocabulary) -> _Element:
    parts: list[str | _Name] = []
    at = 0
    for found in vocabulary.texts.finditer(text) if vocabulary.texts else ():
        token = vocabulary.token(found[0])
        parts += [*map(_quoted, text[at : found.start()]), "(", f"<[{token}]>", "|"]
        parts += [*map(_quoted, found[0]), ")"]
        at = found.end()
    return _Element([*parts, *map(_quoted, text[at:])], is_regular=not parts)


def _quoted(character: str) -> str:
    return json.dumps(character, ensure_ascii=False)


def _class(text: str) -> _Element | None:
    """Return a character class as a regular expression."""
    is_not, members = text.startswith("^"), text.removeprefix("^")
    ranges = []
    # a minus between two characters denotes a range; at the end it is a character
    for found in re.finditer(r"((?:\\(?:[xuU][0-9a-fA-F]+|.)|[^\\]))(-(?!$))?", members, re.DOTALL):
        characters = _characters(found[1])
        if not characters:
            return None
        first, *others = (_in_class(each) for each in characters)
        ranges.append(first + "".join(others) + (found[2] or ""))
    return _Element([f"/[{'^' if is_not else ''}{''.join(ranges)}]/"])


def _in_class(character: str) -> str:
    return (
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
    )


# ---------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------


def _regular_rules(rules: _Rules) -> tuple[set[str], set[str]]:
    """Return the rules that may be terminals, and those of them with a long repetition."""
    sorter = TopologicalSorter(
        {rule: {name.rule for name in _names(each)} for rule, each in rules.items()}
    )
    with suppress(CycleError):  # rules outside cycles are still sorted
        sorter.prepare()
    regular, long = set[str](), set[str]()
    while ready := sorter.get_ready():
        for rule in ready:
            elements = [element for alternative in rules[rule] for element in alternative]
            used = {name.rule for name in _names(rules[rule])}
            if all(element.is_regular for element in elements) and used <= regular:
                regular.add(rule)
                if any(element.is_long for element in elements) or used & long:
                    long.add(rule)
        sorter.done(*ready)
    return regular, long


def _left_recursive(rules: _Rules, regular: set[str]) -> _Rules:
    """Rewrite right-recursive rules as left-recursive.

    Such rules are the states of an automaton. Each new rule describes the texts that lead from the
    first state to one state.
    """
    following = {rule: _next_states(each, regular) for rule, each in rules.items()}
    rewritten = dict(rules)
    for first in rules:
        states = sorted(_states(first, following))
        if not states:
            continue
        leads_to: _Rules = {state: [] for state in states}
        leads_to[first].append([])
        ends: _Rule = []
        for state in states:
            for alternative in rules[state]:
                before = _Element([_Name(f"{first}>{state}")])
                last = _last_name(alternative)
                if last in leads_to:
                    leads_to[last].append([before, *alternative[:-1]])
                else:
                    ends.append([before, *alternative])
        rewritten[first] = ends
        rewritten |= {f"{first}>{state}": rule for state, rule in leads_to.items()}
    return rewritten


def _last_name(alternative: list[_Element]) -> str:
    """Return the rule at the end of an alternative; "" if there is none."""
    match alternative:
        case [*_, _Element(parts=[_Name(rule)])]:
            return rule
    return ""


def _next_states(rule: _Rule, regular: set[str]) -> set[str]:
    """Return the rules at the ends of the alternatives.

    Empty if other rules than regular ones come before them.
    """
    before = [alternative[:-1] if _last_name(alternative) else alternative for alternative in rule]
    if not {name.rule for name in _names(before)} <= regular:
        return set()
    return {_last_name(alternative) for alternative in rule} - {""} - regular


def _states(first: str, following: dict[str, set[str]]) -> set[str]:
    """Return the states on cycles through the first one; empty if there are too many."""
    reached, to_visit = set[str](), [first]
    came_from: dict[str, set[str]] = {}
    while to_visit:
        state = to_visit.pop()
        for after in following[state]:
            came_from.setdefault(after, set()).add(state)
            if after not in reached:
                reached.add(after)
                to_visit.append(after)
        if len(reached) > MAX_REWRITTEN:
            return set()
    states, to_visit = set[str](), [first] if first in reached else []
    while to_visit:
        state = to_visit.pop()
        if state not in states:
            states.add(state)
            to_visit += came_from[state]
    return states
