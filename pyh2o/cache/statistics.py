"""What the KV cache holds and what it costs, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .settings import Budget, whole_blocks


@dataclass(frozen=True)
class KVStatistics:
    """The KV cache of one sequence at one moment.

    Attributes:
        evicting: False for the plain full cache (capacity and budget are then its cells).
        limits: how many rows there may be, and the settings that say so.
        position: tokens of text seen so far, which is the next token's position.
        position_limit: first position that a text cannot reach; 2**31 - 2**20 is as good as none.
        cells: cells allocated.
        used: cells in use.
        pinned: positions that are never evicted, those that were pinned later among them.
        compactions: compactions of the text; this and what follows begins anew with another one.
        tokens_evicted: cells freed by compactions: text tokens that no longer have a cell.
        rows_evicted: K/V rows dropped, summed over layers and KV heads.
        rows_moved: K/V rows moved to another cell.
        compaction_seconds: time spent in compactions.
        rebases: times the kept rows were given new positions.
        rebase_seconds: time spent in that.
        bytes_k, bytes_v, bytes_scores: memory allocated for K and V of the layers that see all of
            the text, and for the scores.
        bytes_window: memory allocated for K and V of layers that see a window of the text.
        bytes_recurrent: memory allocated for the states of recurrent layers.
        archived: tokens in the archive.
        unarchived: tokens that had to leave the archive, because it has a limit.
        bytes_archive: memory of the archive.
        archive_seconds: time spent in copying rows to the archive.
        forgotten: dropped positions of the text (see `Text.drop_spans`).
        n_looked: tokens that have looked for evicted rows since the last prompt began to be read.
        found_share: share of their attention, 0 .. 1, that went to the rows which they found: a
            mean over these tokens, all layers and query heads.
        bytes_full: what a full cache for the window would take, of the same types, with what does
            not grow with the text.
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
    archive_seconds: float = 0.0
    forgotten: int = 0
    n_looked: int = 0
    found_share: float = 0.0

    @property
    def window(self) -> int:
        """The context the user asked for, in tokens; fractions refer to it."""
        return self.limits.window

    @property
    def policy(self) -> str:
        """What makes a row worth keeping, as text (see EvictionSettings)."""
        return str(self.limits.settings.policy)

    @property
    def positions(self) -> str:
        """How rotary embeddings count (see EvictionSettings)."""
        return self.limits.settings.positions

    @property
    def capacity(self) -> int:
        """Most cells that may be in use: budget and slack."""
        return self.limits.capacity

    @property
    def budget(self) -> int:
        """Rows per (layer, KV head) right after a compaction: pinned, heavy and recent ones."""
        return self.limits.rows

    @property
    def heavy(self) -> int:
        """Rows of the budget that are kept for their score."""
        return self.budget - self.recent - self.pinned

    @property
    def recent(self) -> int:
        """Rows of the newest positions, which are never evicted."""
        return self.limits.recent

    @property
    def slack(self) -> int:
        """Cells beyond the budget that fill up between two compactions."""
        return self.limits.slack

    @property
    def bytes_total(self) -> int:
        """K, V and scores together, with what does not grow with the text."""
        return self.bytes_k + self.bytes_v + self.bytes_scores + self.bytes_fixed

    @property
    def bytes_fixed(self) -> int:
        """What does not grow with the text, with any cache: windows and recurrent states."""
        return self.bytes_window + self.bytes_recurrent

    def summary(self) -> str:
        """One line for a person: cells, budget, evictions and memory."""
        memory = f"{mib_text(self.bytes_total)} MiB"
        if not self.evicting:
            return f"KV {self.used}/{self.capacity} cells (full cache) · {memory}"
        return (
            f"KV {self.used}/{self.capacity} cells · budget {self.budget} ({self.parts()}) · "
            f"{self.tokens_evicted:,} evicted · {memory} of {mib_text(self.bytes_full)} MiB full"
        )

    def details(self) -> str:
        """A second line for a person: where the memory goes, and what compactions did."""
        return (
            f"{self.memory_parts()} MiB · window {self.window:,} · policy {self.policy} · "
            f"pinned {self.pinned} · slack {self.slack} · "
            f"{self.compactions:,} compactions · {self.rows_evicted:,} rows evicted · "
            f"{self.rebases:,} re-bases"
        )

    def parts(self) -> str:
        """The budget's parts, for a person."""
        pinned = f"{self.pinned} pinned + " if self.pinned else ""
        return f"{pinned}{self.heavy} heavy + {self.recent} recent"

    def memory_parts(self) -> str:
        """What takes how many MiB, for a person."""
        scores = f" + scores {mib_text(self.bytes_scores)}" if self.evicting else ""
        window = f" + window {mib_text(self.bytes_window)}" if self.bytes_window else ""
        states = f" + states {mib_text(self.bytes_recurrent)}" if self.bytes_recurrent else ""
        return f"K {mib_text(self.bytes_k)} + V {mib_text(self.bytes_v)}{scores}{window}{states}"


def mib_text(n_bytes: float) -> str:
    """Bytes in MiB for a person, without the unit."""
    return f"{n_bytes / 2**20:.1f}"


def mib(n_bytes: int) -> int:
    """Bytes in MiB, rounded up, so that a limit of so many is enough."""
    return -(-n_bytes // 2**20)


def statistics_of(
    counters: Any, limits: Budget, n_tokens: int, position_limit: int, *, evicting: bool
) -> KVStatistics:
    """The statistics of a text.

    Args:
        counters: struct llama_h2o_stats of its sequence.
        limits: how many rows there may be.
        n_tokens: of the text.
        position_limit: first position that it cannot reach.
        evicting: whether rows are evicted.
    """
    cells, used = counters.n_cells, counters.n_used
    if cells == 0:  # of a kind that does not count them
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
        forgotten=counters.n_forgotten,
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
        archive_seconds=counters.t_archive_us / 1e6,
        n_looked=counters.n_looked,
        found_share=counters.found,
    )
