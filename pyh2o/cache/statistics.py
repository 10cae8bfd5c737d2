"""Statistics of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .settings import Budget, whole_blocks


@dataclass(frozen=True)
class KVStatistics:
    """The KV cache of one sequence at one moment. Counters start at 0 with every new text.

    Attributes:
        evicting: False for the plain full cache (capacity and budget are then its cells).
        limits: the budget and its settings.
        position: number of tokens read so far, which is the position of the next token.
        position_limit: maximum number of tokens; 2**31 - 2**20 means practically unlimited.
        cells: allocated cells.
        used: cells in use.
        pinned: number of pinned positions, including those pinned later.
        compactions: number of compactions.
        tokens_evicted: tokens that no longer have a cell, because a compaction freed it.
        rows_evicted: evicted rows, summed over layers and KV heads.
        rows_moved: rows moved to another cell.
        compaction_seconds: time spent in compactions.
        rebases: number of re-bases.
        rebase_seconds: time spent in re-bases.
        bytes_k, bytes_v: memory of K and V in layers with full attention.
        bytes_scores: memory of the scores.
        bytes_window: memory of K and V in sliding-window layers.
        bytes_recurrent: memory of the states of recurrent layers.
        archived: tokens in the archive.
        unarchived: tokens removed from the archive because of its size limit.
        bytes_archive: memory of the archive.
        dropped: number of dropped positions (see `Text.drop_spans`).
        n_looked: tokens that searched the archive since the start of the last prompt.
        found_share: mean share of their attention, from 0 to 1, that went to retrieved rows, over
            all layers and query heads.
        bytes_full: memory of a full cache for the window, with the same types.
    """

    evicting: bool
    limits: Budget
    position: int
    position_limit: int
    cells: int
    used: int
    pinned: int
    compactions: int
    tokens_evicted: int
    rows_evicted: int
    rows_moved: int
    compaction_seconds: float
    rebases: int
    rebase_seconds: float
    bytes_k: int
    bytes_v: int
    bytes_scores: int
    bytes_full: int
    bytes_window: int = 0
    bytes_recurrent: int = 0
    archived: int = 0
    unarchived: int = 0
    bytes_archive: int = 0
    dropped: int = 0
    n_looked: int = 0
    found_share: float = 0.0

    @property
    def window(self) -> int:
        """The requested context, in tokens; fractions in the settings refer to it."""
        return self.limits.window

    @property
    def policy(self) -> str:
        """The policy as text (see `EvictionSettings`)."""
        return str(self.limits.settings.policy)

    @property
    def capacity(self) -> int:
        """Maximum number of cells in use: budget plus slack."""
        return self.limits.capacity

    @property
    def budget(self) -> int:
        """Rows per (layer, KV head) right after a compaction: pinned + heavy + recent."""
        return self.limits.rows

    @property
    def heavy(self) -> int:
        """Rows of the budget kept for their score."""
        return self.budget - self.recent - self.pinned

    @property
    def recent(self) -> int:
        """Rows of the budget kept for the newest positions."""
        return self.limits.recent

    @property
    def slack(self) -> int:
        """Cells beyond the budget that fill up between two compactions."""
        return self.limits.slack

    @property
    def bytes_total(self) -> int:
        """Memory of the cache without the archive."""
        return self.bytes_k + self.bytes_v + self.bytes_scores + self.bytes_fixed

    @property
    def bytes_fixed(self) -> int:
        """Memory that does not depend on eviction: sliding windows and recurrent states."""
        return self.bytes_window + self.bytes_recurrent

    def summary(self) -> str:
        """Return one readable line: cells, budget, evictions and memory."""
        memory = f"{mib_text(self.bytes_total)} MiB"
        if not self.evicting:
            return f"KV {self.used}/{self.capacity} cells (full cache) · {memory}"
        return (
            f"KV {self.used}/{self.capacity} cells · budget {self.budget} ({self.parts()}) · "
            f"{self.tokens_evicted:,} evicted · {memory} of {mib_text(self.bytes_full)} MiB full"
        )

    def details(self) -> str:
        """Return a second readable line: parts of the memory, settings and compactions."""
        return (
            f"{self.memory_parts()} MiB · window {self.window:,} · policy {self.policy} · "
            f"pinned {self.pinned} · slack {self.slack} · "
            f"{self.compactions:,} compactions · {self.rows_evicted:,} rows evicted · "
            f"{self.rebases:,} re-bases"
        )

    def parts(self) -> str:
        """Return the parts of the budget as text."""
        pinned = f"{self.pinned} pinned + " if self.pinned else ""
        return f"{pinned}{self.heavy} heavy + {self.recent} recent"

    def memory_parts(self) -> str:
        """Return the parts of the memory as text, in MiB."""
        scores = f" + scores {mib_text(self.bytes_scores)}" if self.evicting else ""
        window = f" + window {mib_text(self.bytes_window)}" if self.bytes_window else ""
        states = f" + states {mib_text(self.bytes_recurrent)}" if self.bytes_recurrent else ""
        return f"K {mib_text(self.bytes_k)} + V {mib_text(self.bytes_v)}{scores}{window}{states}"


def mib_text(n_bytes: float) -> str:
    """Return MiB with one decimal, without the unit."""
    return f"{n_bytes / 2**20:.1f}"


def mib(n_bytes: int) -> int:
    """Return MiB, rounded up, so that the result suffices as a limit."""
    return -(-n_bytes // 2**20)


def statistics_of(
    counters: Any, limits: Budget, n_tokens: int, position_limit: int, *, evicting: bool
) -> KVStatistics:
    """Return the statistics of a text from the struct llama_h2o_stats of its sequence."""
    cells, used = counters.n_cells, counters.n_used
    if cells == 0:  # a kind of cache without counters
        cells, used = limits.window, n_tokens
    bytes_full = counters.size_k + counters.size_v
    if evicting:
        bytes_full = bytes_full // cells * whole_blocks(limits.window)
    return KVStatistics(
        evicting=evicting,
        limits=limits,
        position=n_tokens,
        position_limit=position_limit,
        cells=cells,
        used=used,
        pinned=counters.n_pinned,
        dropped=counters.n_forgotten,
        compactions=counters.n_compactions,
        tokens_evicted=counters.n_cells_freed,
        rows_evicted=counters.n_rows_evicted,
        rows_moved=counters.n_rows_moved,
        compaction_seconds=counters.t_compactions_us / 1e6,
        rebases=counters.n_rebases,
        rebase_seconds=counters.t_rebases_us / 1e6,
        bytes_k=counters.size_k,
        bytes_v=counters.size_v,
        bytes_scores=counters.size_scores,
        bytes_full=bytes_full + counters.size_window + counters.size_recurrent,
        bytes_window=counters.size_window,
        bytes_recurrent=counters.size_recurrent,
        archived=counters.n_archived,
        unarchived=counters.n_unarchived,
        bytes_archive=counters.size_archive,
        n_looked=counters.n_looked,
        found_share=counters.found,
    )
