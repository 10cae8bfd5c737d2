"""What the KV cache holds and what it costs, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVStatistics:
    """The KV cache of one sequence at one moment.

    Attributes:
        evicting: False for the plain full cache (capacity and budget are then the window).
        window: the context the user asked for, in tokens; fractions refer to it.
        position: tokens of text seen so far, which is the next token's position.
        position_limit: first position that a text cannot reach; 2**31 - 1 is as good as none.
        policy: what makes a row worth keeping (see EvictionSettings).
        positions: how rotary embeddings count (see EvictionSettings).
        cells: cells allocated.
        used: cells in use.
        capacity: most cells that may be in use (budget + slack).
        budget: rows per (layer, KV head) right after a compaction.
        heavy, recent, pinned, slack: the parts of capacity.
        compactions: compactions so far.
        tokens_evicted: cells freed by compactions so far: text tokens that no longer have a cell.
        rows_evicted: K/V rows dropped so far, summed over layers and KV heads.
        rows_moved: K/V rows moved to another cell so far.
        compaction_seconds: time spent in compactions.
        rebases: times the kept rows were given new positions so far.
        rebase_seconds: time spent in that.
        bytes_k, bytes_v, bytes_scores: memory allocated for K, V and the scores.
        bytes_full: what K and V of a full cache for the window would take, of the same types.
    """

    evicting: bool
    window: int
    position: int
    position_limit: int
    policy: str
    positions: str
    cells: int
    used: int
    capacity: int
    budget: int
    heavy: int
    recent: int
    pinned: int
    slack: int
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

    @property
    def bytes_total(self) -> int:
        """K, V and scores together."""
        return self.bytes_k + self.bytes_v + self.bytes_scores

    def summary(self) -> str:
        """One line for a person: cells, budget, evictions and memory."""
        memory = f"{_mib(self.bytes_total)} MiB"
        if not self.evicting:
            return f"KV {self.used}/{self.capacity} cells (full cache) · {memory}"
        return (
            f"KV {self.used}/{self.capacity} cells · budget {self.budget} ({self.parts()}) · "
            f"{self.tokens_evicted:,} evicted · {memory} of {_mib(self.bytes_full)} MiB full"
        )

    def details(self) -> str:
        """A second line for a person: where the memory goes, and what compactions did."""
        return (
            f"K {_mib(self.bytes_k)} + V {_mib(self.bytes_v)} + scores {_mib(self.bytes_scores)} "
            f"MiB · window {self.window:,} · policy {self.policy} · pinned {self.pinned} · "
            f"slack {self.slack} · "
            f"{self.compactions:,} compactions · {self.rows_evicted:,} rows evicted · "
            f"{self.rebases:,} re-bases"
        )

    def parts(self) -> str:
        """The budget's parts, for a person."""
        pinned = f"{self.pinned} pinned + " if self.pinned else ""
        return f"{pinned}{self.heavy} heavy + {self.recent} recent"


def _mib(n: int) -> str:
    return f"{n / 2**20:.1f}"
