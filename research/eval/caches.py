"""Compared caches: their budgets in rows, and how they are opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyh2o.cache.settings import EvictionSettings, default_recall
from pyh2o.compat.llama import Llama
from pyh2o.errors import SettingsError
from pyh2o.policies import Streaming

FULL = "full"
# The baseline of all other policies: a few sinks and the newest tokens (Xiao et al. 2024).
STREAMING = Streaming.name

# A fraction of the tokens (float) or a count of rows (int).
Rows = float | int


@dataclass(frozen=True)
class Compute:
    """CPU threads; layers on the GPU or on servers, -1 for all; and host:port of the servers."""

    threads: int
    gpu_layers: int = 0
    rpc_servers: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `Llama`."""
        return {
            "n_threads": self.threads,
            "n_threads_batch": self.threads,
            "n_gpu_layers": self.gpu_layers,
            "rpc_servers": self.rpc_servers,
            "verbose": False,
        }


@dataclass(frozen=True)
class MeasuredCache:
    """A cache under test.

    Attributes:
        name: shown in tables; unique in a comparison.
        policy: that selects the rows; "full" for a cache without eviction.
        budget: as requested, in words.
        rows: rows that a token attends to after a compaction, including retrieved rows; 0 for a
            full cache, which has no limit.
        heavy, recent, pinned: the parts of rows.
        recall: retrieved rows, which reduce the heavy rows first. 0 keeps no archive.
    """

    name: str
    policy: str = FULL
    budget: str = ""
    rows: int = 0
    heavy: int = 0
    recent: int = 0
    pinned: int = 0
    recall: int = 0

    @property
    def is_full(self) -> bool:
        """Whether it has no eviction."""
        return self.policy == FULL

    @property
    def is_streaming(self) -> bool:
        """Whether it is the baseline of sinks and a window."""
        return is_streaming(self.policy)

    def eviction(self) -> dict[str, Any]:
        """Return its fields of EvictionSettings; those of a full cache evict nothing."""
        if self.is_full:
            return {"hh": 0.5, "recent": 0.5, "recall": 0}
        return {
            "hh": self.heavy,
            "recent": self.recent,
            "pinned": self.pinned,
            "policy": self.policy,
            "recall": self.recall,
        }


FULL_CACHE = MeasuredCache(FULL)


def is_streaming(policy: str) -> bool:
    """Return whether a policy is sinks and a window, whatever its parameters."""
    return policy.partition(":")[0] == STREAMING


def budget_name(budget: Rows) -> str:
    """Return a budget in words: "20 %" or "1638 rows"."""
    return f"{budget} rows" if isinstance(budget, int) else f"{budget * 100:g} %"


def recall_name(recall: Rows | None) -> str:
    """Return the suffix of a cache's name for its retrieved rows; nothing for the default."""
    if recall is None:
        return ""
    return f"recall {budget_name(recall)}" if recall else "no recall"


def parts_of(
    budget: Rows,
    tokens: int,
    *,
    recent_share: float = 0.5,
    pinned: int = 0,
    recall: Rows | None = 0,
) -> dict[str, Any]:
    """Return a budget's rows and their parts, as fields of MeasuredCache.

    Args:
        budget: a fraction of the tokens (float) or a count (int).
        tokens: the base of fractions.
        recent_share: share of the rows that are not pinned.
        pinned: rows that are never evicted; part of the budget.
        recall: retrieved rows of the budget, a fraction or a count; None for the settings' default.

    Raises:
        SettingsError: no row is left in the cache that is not pinned.
    """
    rows = budget if isinstance(budget, int) else int(budget * tokens)
    free = rows - pinned
    besides = f" besides {pinned} pinned rows" if pinned else ""
    if free < 1:
        raise SettingsError(
            f"--budget {budget} is {rows} rows of {tokens} tokens, which leaves none{besides}: "
            "raise --budget"
        )
    found = default_recall(free)
    if recall is not None:
        found = recall if isinstance(recall, int) else int(recall * tokens)
    if found >= free:
        raise SettingsError(
            f"--recall {recall} is {found} of the {rows} rows of --budget {budget}, which leaves "
            f"none in the cache{besides}: lower --recall"
        )
    recent = max(1, round(free * recent_share))
    return {
        "rows": rows,
        "heavy": free - recent,
        "recent": recent,
        "pinned": pinned,
        "recall": found,
    }


def check_budgets(caches: Iterable[MeasuredCache], window: int, n_ctx_train: int) -> None:
    """Refuse a budget that the model does not support, before measuring.

    Args:
        caches: the compared caches.
        window: longest text in tokens.
        n_ctx_train: trained context.

    Raises:
        SettingsError: it needs more positions.
    """
    for cache in caches:
        if not cache.is_full:
            EvictionSettings(**cache.eviction()).resolve(max(window, cache.rows), n_ctx_train)


def open_llama(
    model: Path, cache: MeasuredCache, *, window: int, compute: Compute, **more: Any
) -> Llama:
    """Open the model with a cache.

    The full cache is one whose budget covers the window, unless `evict=False` asks for llama.cpp's
    own: it computes attention as the caches with eviction do. llama.cpp's own rounds differently,
    which on the demo model moves predictions by a fifth of the effect of eviction at 20 %, and
    would be counted as a loss by eviction.

    Args:
        model: a GGUF file.
        cache: the cache under test.
        window: longest text in tokens.
        compute: devices and threads.
        **more: further arguments of `Llama`.

    Raises:
        PyH2OError: the model or the cache is refused.
    """
    return Llama(
        str(model),
        n_ctx=max(window, cache.rows),
        **{**compute.arguments(), **cache.eviction(), **more},
    )


def check_full(llm: Llama) -> None:
    """Check that a full cache evicted nothing.

    Raises:
        SettingsError: rows were evicted.
    """
    if llm.evicting and llm.kv.compactions:
        raise SettingsError(
            f"{llm.n_tokens} tokens do not fit the {llm.kv.capacity} rows of this model's full "
            "cache: give fewer --tokens"
        )
