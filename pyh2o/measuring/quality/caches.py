"""The caches that are compared, and how they are opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cache.settings import EvictionSettings, Positions
from ...errors import SettingsError
from ...llama import Llama
from ...policies import Streaming, parse_policy
from ..tables import budget_name

FULL = "full"
# The policy that all others are measured by: a few sinks and the newest tokens (Xiao et al. 2024).
STREAMING = Streaming.name


def default_recent_share() -> float:
    """The recent rows' share of what a default budget does not pin."""
    default = EvictionSettings()
    return default.recent / (default.hh + default.recent)


def policy_named(text: str) -> str:
    """A policy or "full" as it is written everywhere, with no parameter that is the default.

    Raises:
        SettingsError: there is no such policy or parameter.
    """
    return FULL if text == FULL else str(parse_policy(text))


@dataclass(frozen=True)
class Compute:
    """What computes.

    Attributes:
        threads: of the CPU.
        gpu_layers: layers to run on the GPU; -1 is all of them.
    """

    threads: int
    gpu_layers: int = 0


@dataclass(frozen=True)
class CacheSettings:
    """What the user asks for.

    Attributes:
        policies: such as "h2o" or "snap:queries=64", each as `str` of it is; "full" is the full
            cache.
        budgets: rows to keep: fractions of the text's tokens (float) or counts (int).
        recent_share: of the rows that are not pinned, kept because they are recent.
        pinned: first positions that are never evicted; they are a part of the budget.
        positions: schemes for the rotary embeddings.
    """

    policies: tuple[str, ...]
    budgets: tuple[float | int, ...]
    recent_share: float
    pinned: int = 0
    positions: tuple[Positions, ...] = ("original",)

    def __post_init__(self) -> None:
        """Refuse what makes no sense with any text.

        Raises:
            SettingsError: nothing to compare, or a share out of its range.
        """
        if not (self.policies and self.budgets and self.positions):
            raise SettingsError("give at least one --policy, one --budget and one --positions")
        if not 0 < self.recent_share <= 1:
            raise SettingsError(
                f"--recent-share {self.recent_share:g}: give more than 0 and at most 1"
            )
        for budget in self.budgets:
            if isinstance(budget, float) and budget > 1:
                raise SettingsError(
                    f"--budget {budget} is more than the whole text: give a fraction up to 1.0, or "
                    "a whole number of rows"
                )


@dataclass(frozen=True)
class EvalCache:
    """One cache that is measured.

    Attributes:
        name: as shown in tables; no other cache for the same text has it.
        policy: that chooses the rows; "full" for the full cache.
        rows: budget; 0 for the full cache, which has no limit.
        heavy, recent, pinned: its parts.
        positions: for the rotary embeddings.
        budget: as it was asked for, in words.
    """

    name: str
    policy: str
    rows: int = 0
    heavy: int = 0
    recent: int = 0
    pinned: int = 0
    positions: Positions = "original"
    budget: str = ""

    @property
    def is_full(self) -> bool:
        """Whether nothing is evicted."""
        return self.policy == FULL

    @property
    def is_streaming(self) -> bool:
        """Whether this is sinks and a window, which the others are compared with."""
        return self.policy.partition(":")[0] == STREAMING


FULL_CACHE = EvalCache(FULL, FULL)


def caches_to_compare(settings: CacheSettings, tokens: int) -> list[EvalCache]:
    """The full cache and all others for a text, in the order in which they are shown.

    Args:
        settings: what is asked for.
        tokens: of the text, which fractions refer to.

    Raises:
        SettingsError: a budget without room for a row that is not pinned.
    """
    caches = [FULL_CACHE]
    for budget in settings.budgets:
        heavy, recent = _split(budget, tokens, settings)
        for policy in settings.policies:
            if policy == FULL:
                continue
            for positions in settings.positions:
                name = f"{policy}, {budget_name(budget)}"
                caches.append(
                    EvalCache(
                        name if positions == "original" else f"{name}, {positions}",
                        policy,
                        rows=settings.pinned + heavy + recent,
                        heavy=heavy,
                        recent=recent,
                        pinned=settings.pinned,
                        positions=positions,
                        budget=budget_name(budget),
                    )
                )
    return caches


def _split(budget: float | int, tokens: int, settings: CacheSettings) -> tuple[int, int]:
    """Heavy and recent rows of a budget."""
    rows = budget if isinstance(budget, int) else int(budget * tokens)
    free = rows - settings.pinned
    if free < 1:
        pinned = f" besides {settings.pinned} that are pinned" if settings.pinned else ""
        raise SettingsError(
            f"--budget {budget} is {rows} rows of {tokens} tokens, which leaves none{pinned}: give "
            "a larger one"
        )
    recent = max(1, round(free * settings.recent_share))
    return free - recent, recent


def check_caches(caches: Iterable[EvalCache], window: int, n_ctx_train: int) -> None:
    """Refuse a budget that the model cannot have, before anything is measured.

    Args:
        caches: which.
        window: most tokens of the text.
        n_ctx_train: positions the model was trained on.

    Raises:
        SettingsError: it needs more positions.
    """
    for cache in caches:
        if not cache.is_full:
            settings = EvictionSettings(**_eviction(cache))
            settings.resolve(max(window, cache.rows), n_ctx_train)


def open_llama(
    model: Path, cache: EvalCache, *, window: int, compute: Compute, **more: Any
) -> Llama:
    """The model with a cache.

    The full cache is one whose budget covers the window: it computes attention as those do that
    evict. llama.cpp's own full cache rounds otherwise, which on the demo model moves predictions by
    a fifth of what eviction at 20 % does, and would be counted as a loss by eviction.

    Args:
        model: a GGUF file.
        cache: what it keeps.
        window: most tokens of the text.
        compute: what computes.
        **more: further arguments of `Llama`.

    Raises:
        PyH2OError: the model or the cache is refused.
    """
    kept = {"hh": 0.5, "recent": 0.5} if cache.is_full else _eviction(cache)
    return Llama(
        str(model),
        n_ctx=max(window, cache.rows),
        n_threads=compute.threads,
        n_threads_batch=compute.threads,
        n_gpu_layers=compute.gpu_layers,
        verbose=False,
        **{**kept, **more},
    )


def open_for_tokens(model: Path) -> Llama:
    """The model, to tokenise with.

    Args:
        model: a GGUF file.

    Raises:
        PyH2OError: the model is refused.
    """
    return open_llama(model, FULL_CACHE, window=1, compute=Compute(threads=1), evict=False)


def _eviction(cache: EvalCache) -> dict[str, Any]:
    """The fields of EvictionSettings that a cache sets."""
    return {
        "hh": cache.heavy,
        "recent": cache.recent,
        "pinned": cache.pinned,
        "positions": cache.positions,
        "policy": cache.policy,
    }


def check_full(llm: Llama) -> None:
    """Make sure that a full cache is one, after what was read.

    Raises:
        SettingsError: rows were evicted.
    """
    if llm.evicting and llm.kv.compactions:
        raise SettingsError(
            f"{llm.n_tokens} tokens do not fit the {llm.kv.capacity} rows that the full cache can "
            "have with this model: give fewer --tokens"
        )
