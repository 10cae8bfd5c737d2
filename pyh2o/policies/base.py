"""The base class of policies, and the rows that they score."""

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

Scope = Literal["head", "layer", "cache"]

# llama.cpp's positions are 32-bit integers.
LARGEST_COUNT = 2**31 - 1

# A score that exceeds all positions and measured scores, so that the row is kept.
SAFE_SCORE = 2.0**31

# Optional arrays of `HeadRows`, which are empty unless `Policy.needs` lists them.
Need = Literal["attention", "squares", "query_attention", "keys", "value_norms", "queries"]


def _nothing() -> npt.NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class HeadRows:
    """The rows of one (layer, KV head) at a compaction, in text order.

    Attributes:
        positions: [n] token positions, ascending.
        newest: the last position of the text, also the last of `positions`.
        pinned: [n] whether a row is pinned.
        competing: [n] whether a row is neither pinned nor recent, and may be evicted.
        n_places: number of competing rows to keep.
        n_recent: size of the recent window, in tokens.
        layer, head: layer of the model, and KV head of the layer.
        attention: [n] collected attention: attention weights, averaged over the query heads of the
            group, summed over the queries since the row was written and reduced by the half-life.
        squares: [n] the same sum of squared weights.
        query_attention: [n] attention of the last queries, computed at the compaction from the
            cached rows: softmax over all rows up to the query's position, averaged over the query
            heads of the group, summed over the queries. There may be fewer queries than `n_queries`
            if the recent window is smaller or the tail of the text was removed.
        value_norms: [n] norms of V.
        keys: [n, head_size] cached keys, with RoPE; if `needs` lists "keys" or "queries".
        queries: [n_queries, group, head_size] the last queries, with RoPE.
        query_positions: [n_queries] their token positions, ascending.
        scale: factor for products of keys and queries before the softmax.
        rope_frequencies: [head_size / 2] radians per position by which RoPE rotates each pair of
            adjacent elements of keys and queries; empty if unknown.
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
        """[n] number of queries that could attend to each row, including its own."""
        ages: IntArray = self.newest - self.positions + 1
        return ages

    def best(self, scores: FloatArray, n_best: int) -> IntArray:
        """Return the indices of the `n_best` competing rows with the highest scores."""
        competing = np.flatnonzero(self.competing)
        # lexsort sorts by its last key first: by score, and equal scores by position
        ascending = competing[np.lexsort((self.positions[competing], scores[competing]))]
        best: IntArray = ascending[max(0, ascending.size - n_best) :]
        return best


@dataclass(frozen=True)
class _Limits:
    """The valid values of a parameter."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    odd: bool = False

    def allow(self, value: float) -> bool:
        return (  # infinity and NaN are never valid
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
    """Return a dataclass field for a parameter of a policy.

    Args:
        default: an int, float or bool; values must have the same type.
        least, most: limits.
        above: exclude `least` itself.
        odd: only odd numbers.
    """
    return field(default=default, metadata={"limits": _Limits(least, most, above, odd)})


# Parser and description of each type of parameter.
KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
}


@dataclass(frozen=True)
class Policy(ABC):
    """A rule that scores rows. Its fields are its parameters, each with a default.

    Attributes:
        name: name for users; module and class name of a custom policy.
        file: FILE:CLASS that `parse_policy` loaded it from; "" otherwise.
        needs: arrays of `HeadRows` that it uses; "squares" implies "attention". With "attention",
            `Llama.kv_rows` shows the collected attention as scores, otherwise the scores of the
            last compaction.
        scope: "head" selects rows for each (layer, KV head) separately. "layer" averages scores
            over the KV heads of a layer, and "cache" over all layers too, so that these heads keep
            the same positions.

    Raises:
        SettingsError: a parameter has the wrong type or is out of its limits.
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
        """Return the default of each parameter."""
        defaults = {item.name: item.default for item in fields(cls)}
        for name, default in defaults.items():
            if type(default) not in KINDS:
                raise SettingsError(
                    f"{cls.name}: the default of {name} is {default!r}: give a number or a bool"
                )
        return defaults

    @property
    def n_queries(self) -> int:
        """Number of last queries that the policy uses, limited by the recent window."""
        return 0

    @property
    def n_near(self) -> int:
        """Distance in tokens below which attention is not collected; 0 collects all.

        If it is not 0, the half-life applies per token instead of per compaction.
        """
        return 0

    @property
    def half_life(self) -> float | None:
        """Number of tokens after which collected attention counts for half; None for no decay."""
        return None

    def for_budget(self, rows: int) -> Policy:
        """Return the policy with defaults filled in that depend on the rows per head."""
        return self

    @abstractmethod
    def score(self, rows: HeadRows) -> FloatArray:
        """Return [n] finite scores; the competing rows with the highest ones are kept.

        `SAFE_SCORE` exceeds all others.
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
        """Return the text for `parse_policy`: the name, and parameters that are not the default."""
        return self._text(self.file or self.name)

    @property
    def identity(self) -> str:
        """The same text without the path of a file; sessions store it."""
        return self._text(self.name)

    @property
    def full_text(self) -> str:
        """The name with all parameters, for the native library and states."""
        return self._text(self.name, all_of_them=True)

    def _text(self, name: str, *, all_of_them: bool = False) -> str:
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        assignments = [
            f"{parameter}={repr(value).lower().removesuffix('.0')}"
            for parameter, (value, default) in values.items()
            if all_of_them or value != default
        ]
        return name + (":" + ",".join(assignments) if assignments else "")


def checked_scores(policy: Policy, rows: HeadRows) -> FloatArray:
    """Return [n] scores from a policy, 0 for rows that do not compete.

    Raises:
        PolicyError: the policy does not return a finite number for each competing row.
    """
    n = rows.positions.size
    if not rows.competing.any():
        return np.zeros(n)
    scores = np.asarray(policy.score(rows))
    if scores.shape != (n,) or scores.dtype.kind not in "fiu":
        raise PolicyError(
            f"{policy}: score() returns {scores.dtype} {list(scores.shape)} for {n} rows: return "
            "one number per row, and list the arrays it uses in `needs`"
        )
    scores = np.where(rows.competing, scores, 0).astype(np.float64)
    # `Llama.kv_rows` returns them as float32
    n_wrong = np.count_nonzero(~(np.abs(scores) <= np.finfo(np.float32).max))
    if n_wrong:
        raise PolicyError(
            f"{policy}: score() returns {n_wrong} scores of {n} in layer {rows.layer}, KV head "
            f"{rows.head}, that are not finite float32 numbers: correct it"
        )
    return scores
