"""What a policy is, and what it sees of the rows that it has to judge."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import PolicyError, SettingsError

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Whose scores are averaged before the choice, so that they all keep the same positions.
Scope = Literal["head", "layer", "cache"]

# llama.cpp counts positions in 32 bits.
LARGEST_COUNT = 2**31 - 1

# Keeps a row ahead of all others: above every position, and above all that a policy measures.
SAFE_SCORE = 2.0**31


# What a policy may look at beside positions; of what it does not name it gets an empty array.
Need = Literal["attention", "squares", "query_attention", "keys", "value_norms", "queries"]


def _nothing() -> npt.NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class HeadRows:
    """The rows of one (layer, KV head) at a compaction, in the order of the text.

    Attributes:
        positions: [n] token positions, ascending.
        newest: highest position of the text, which is the last one here.
        pinned: [n] rows that are never evicted, for their position.
        competing: [n] rows that are neither pinned nor recent, and have to earn their place.
        n_places: how many of them stay.
        n_recent: size of the recent window in tokens.
        layer, head: the number of the layer in the model, and of the KV head in the layer.
        attention: [n] attention collected: sum over the queries since the row was written, mean
            over the query heads of the group, less what the policy's half-life took away.
        squares: [n] the same sum of squared probabilities.
        query_attention: [n] attention that the last queries pay to these rows: softmax over all
            rows of the cache that are not in a query's future, sum over the queries, mean over the
            query heads of the group, computed now from the rows as they are cached. Fewer queries
            than the policy asks for, or none, where the recent window is smaller or the tail of the
            text was removed.
        value_norms: [n] lengths of V.
        keys: [n, head_size] as cached, so rotated; with `keys` or `queries` of `needs`.
        queries: [n_queries, group, head_size] those queries as they met the keys, so rotated.
        query_positions: [n_queries] their token positions, ascending.
        scale: what products of keys and queries are multiplied with before the softmax.
        rope_frequencies: [head_size / 2] radians by which one position turns each pair of
            neighbouring elements of keys and queries; empty where that is not known.
    """

    positions: IntArray
    newest: int
    pinned: BoolArray
    competing: BoolArray
    n_places: int
    n_recent: int
    layer: int
    head: int
    attention: FloatArray = field(default_factory=_nothing)
    squares: FloatArray = field(default_factory=_nothing)
    query_attention: FloatArray = field(default_factory=_nothing)
    value_norms: FloatArray = field(default_factory=_nothing)
    keys: FloatArray = field(default_factory=_nothing)
    queries: FloatArray = field(default_factory=_nothing)
    query_positions: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    scale: float = 0.0
    rope_frequencies: FloatArray = field(default_factory=_nothing)

    @property
    def ages(self) -> IntArray:
        """[n] queries that could see each row, its own included, had none been removed."""
        ages: IntArray = self.newest - self.positions + 1
        return ages

    def best(self, scores: FloatArray, n_best: int) -> IntArray:
        """[n_best] indices of the competing rows with the highest scores; the newer of equals."""
        competing = np.flatnonzero(self.competing)
        # lexsort sorts by its last key first: score, then position; both ascending.
        ascending = competing[np.lexsort((self.positions[competing], scores[competing]))]
        best: IntArray = ascending[max(0, ascending.size - n_best) :]
        return best


@dataclass(frozen=True)
class _Limits:
    """Which values a parameter may have."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    odd: bool = False

    def allow(self, value: float) -> bool:
        # Neither infinity nor nan is a value, whatever the limits.
        return (
            -math.inf < value < math.inf
            and self.least <= value <= self.most
            and not (self.above and value == self.least)
            and not (self.odd and value % 2 == 0)
        )

    def __str__(self) -> str:
        kind = "an odd number" if self.odd else "a number"
        if self.most < math.inf:
            return f"{kind} from {self.least} to {self.most}"
        if self.least == -math.inf:
            return f"{kind} that is finite"
        return f"{kind} above {self.least}" if self.above else f"{kind} of {self.least} or more"


def parameter(
    default: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: bool = False,
    odd: bool = False,
) -> Any:
    """A field of a policy with the limits of its value.

    Args:
        default: also says by its type what the values are: int, float or bool.
        least, most: limits.
        above: `least` itself is too little.
        odd: only odd numbers.
    """
    return field(default=default, metadata={"limits": _Limits(least, most, above, odd)})


# How values of each type are read, and what to say of others.
KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
}


@dataclass(frozen=True)
class Policy(ABC):
    """A rule that scores rows. Its fields are its parameters, each with a default.

    Attributes:
        name: as users give it; of a class elsewhere its module and name.
        file: where it was loaded from, and its name there (`parse_policy`); "" for nowhere.
        needs: what it looks at beside positions; squares come with attention. If it looks at
            attention, what a model shows as the scores of its rows are these sums, and otherwise
            what the policy gave them at the last compaction.
        scope: "head" for a choice of each (layer, KV head) on its own. With "layer" the scores are
            averaged over the KV heads of a layer before the choice, with "cache" over those of all
            layers, and all of them keep the same positions.

    Raises:
        SettingsError: a parameter is of the wrong type or out of its limits.
    """

    name: ClassVar[str]
    file: ClassVar[str] = ""
    needs: ClassVar[tuple[Need, ...]] = ()
    scope: ClassVar[Scope] = "head"

    def __init_subclass__(cls) -> None:
        cls.name = f"{cls.__module__}:{cls.__qualname__}"
        if "squares" in cls.needs and "attention" not in cls.needs:
            cls.needs = ("attention", *cls.needs)
        unknown = set(cls.needs) - set(get_args(Need))
        if unknown:
            raise SettingsError(
                f"{cls.name} needs {', '.join(sorted(unknown))}: give some of "
                f"{', '.join(get_args(Need))}"
            )

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The defaults of its parameters, by their names."""
        defaults = {item.name: item.default for item in fields(cls)}
        for name, default in defaults.items():
            if type(default) not in KINDS:
                raise SettingsError(
                    f"{cls.name}: give {name} a default that is a number, or true or false"
                )
        return defaults

    @property
    def n_queries(self) -> int:
        """Last queries that the policy looks at; the recent window may have fewer."""
        return 0

    @property
    def n_near(self) -> int:
        """Attention from less than so many tokens away is not collected; 0 collects all.

        A policy with such a number counts each query by its half-life, and not each stretch of text
        between two compactions.
        """
        return 0

    @property
    def half_life(self) -> float | None:
        """Tokens in which half of the collected attention is forgotten; None keeps all."""
        return None

    def for_budget(self, rows: int) -> Policy:
        """The policy for a cache that keeps so many rows of each head, without open parameters."""
        return self

    @abstractmethod
    def score(self, rows: HeadRows) -> FloatArray:
        """[n] scores; higher ones are kept. Those of rows that do not compete do not matter.

        They are finite; `SAFE_SCORE` keeps a row ahead of all others.
        """

    def __post_init__(self) -> None:
        defaults = self.parameters()
        for item in fields(self):
            value = getattr(self, item.name)
            kind: type = type(defaults[item.name])
            if kind is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, item.name, value)
            if type(value) is not kind:
                _, wanted = KINDS[kind]
                raise SettingsError(f"{self.name}: {item.name} is {value!r}: give {wanted}")
            limits = item.metadata.get("limits", _Limits())
            if not limits.allow(value):
                raise SettingsError(f"{self.name}: {item.name} is {value!r}: give {limits}")

    def __str__(self) -> str:
        """As users give it: the name, and the parameters that are not the default."""
        return self._text(self.file or self.name)

    @property
    def identity(self) -> str:
        """The same by its name, wherever its file lies: what sessions remember."""
        return self._text(self.name)

    @property
    def full_text(self) -> str:
        """The name with all parameters, as the native library and a state know it."""
        return self._text(self.name, all_of_them=True)

    def _text(self, name: str, *, all_of_them: bool = False) -> str:
        """With the parameters that are not the default, or all, exactly as they are read."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        assignments = [
            f"{parameter}={repr(value).lower().removesuffix('.0')}"
            for parameter, (value, default) in values.items()
            if all_of_them or value != default
        ]
        return name + (":" + ",".join(assignments) if assignments else "")


def checked_scores(policy: Policy, rows: HeadRows) -> FloatArray:
    """[n] what a policy gives to rows, and 0 for those that do not compete.

    Raises:
        PolicyError: it gives no finite number to each row that competes.
    """
    n = rows.positions.size
    if not rows.competing.any():
        return np.zeros(n)
    scores = np.asarray(policy.score(rows))
    if scores.shape != (n,) or scores.dtype.kind not in "fiu":
        raise PolicyError(
            f"{policy}: score() gives {scores.dtype} {list(scores.shape)} for {n} rows: it has to "
            "give a number for each, and to name in `needs` what it looks at"
        )
    scores = np.where(rows.competing, scores, 0).astype(np.float64)
    # they are also shown, as float32
    n_wrong = np.count_nonzero(~(np.abs(scores) <= np.finfo(np.float32).max))
    if n_wrong:
        raise PolicyError(
            f"{policy}: score() gives {n_wrong} of {n} rows of layer {rows.layer}, KV head "
            f"{rows.head} no finite number: correct it"
        )
    return scores
