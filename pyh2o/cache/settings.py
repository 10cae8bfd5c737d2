"""Eviction settings: what the user asks for, and the row counts it comes to for one window."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..errors import SettingsError
from ..policies import Policy, parse_policy
from ..system.integers import check_count

# How rotary embeddings count: as the text does until the trained context is used up, or dense from
# 0 again at every compaction (the paper's streaming variant).
Positions = Literal["original", "dense"]

# What computes attention and scores: the fastest exact one there is, llama.cpp's own ops (which run
# on every device), or the op of ours for one instruction set; that for bf16 rounds prompts to it.
Attention = Literal["auto", "ops", "portable", "neon", "avx2", "avx512", "avx512bf16"]

# How a text that is longer than the cache is read: in chunks with compactions between them, or in
# full in a larger cache, which is compacted once.
Prefill = Literal["stream", "exact"]

# Of the rows in the archive, by their ggml names.
ArchiveType = Literal["f32", "f16", "q8_0", "q4_0"]

# What makes a row worth keeping, where nobody says (see pyh2o.policies).
DEFAULT_POLICY = "h2o-far"

# llama.cpp allocates cells in blocks of this size, so a smaller slack would save no memory.
CELL_BLOCK = 256
# A compaction sorts every row's score; over this many tokens its cost is lost in the noise. More
# rows take longer: at least one token for so many of them.
MIN_SLACK = 64
ROWS_PER_SLACK = 20
# No more tokens than fit the slack are computed at once, and fewer leave much of a GPU idle.
GPU_SLACK = 512

# What is smaller cannot even hold a question.
MIN_WINDOW = 32

# Of the rows that a token attends to, it finds one in so many among the evicted ones. More than
# MAX_FOUND are no better (docs/recall.md).
ROWS_PER_FOUND = 8
MAX_FOUND = 256
# MiB of an archive without a limit of its own: at least so many where that much memory is free, and
# never too few for a page.
ARCHIVE_MIB = 1024
MIN_ARCHIVE_MIB = 256
# As many as there are addresses for: no limit.
UNLIMITED_MIB = 2**43

# Of a setting that a saved cache does not depend on: it may differ when the cache is loaded.
_NOT_SAVED: dict[str, Any] = {"saved": None}


@dataclass(frozen=True)
class EvictionSettings:
    """What to keep, as fractions of the window (0 < x <= 1, a float) or token counts (an int).

    Attributes:
        hh: heavy rows, kept for the score that the policy gives them.
        recent: rows of the newest positions, never evicted; at least one. With the heavy ones they
            are all that a token attends to, beside the pinned: those of `recall` are taken from
            the heavy ones, and what these lack from the recent ones.
        pinned: number of first positions that are never evicted (a count).
        slack: cells beyond the budget that fill up between two compactions; None is 64, or
            a twentieth of a larger budget, and what fills the last block of cells llama.cpp
            allocates anyway; with layers on a GPU of this machine at least 512, as far as the
            window goes. 1 is the paper's algorithm.
        policy: what makes a row worth keeping (see pyh2o.policies); its text, such as
            "snap:queries=32" or "my_file.py:MyPolicy", is read.
        positions: "original" positions for the rotary embeddings until those the model was trained
            on are used up, when all rows go back by half of them; or "dense" ones, 0, 1, 2 ... in
            the order of the text, at every compaction.
        attention: what computes attention and scores. Everything but "auto" and "ops" is refused
            where it cannot be used; all give the same result but for the order of additions. Only
            "avx512bf16" rounds what it multiplies, to 8 bits, where many tokens are read at once.
        score_every: where scores cost a second look at K, they are those of every n-th query of
            a batch of 4 n or more, scaled. That is so only beside ggml's flash attention, and with
            recall 0: elsewhere, and with 1, all queries count.
        prefill: "stream" reads a text that is longer than the cache in chunks, with compactions
            between them; "exact" reads it in full in a larger cache, which is compacted once and
            freed.
        prefill_mib: most MiB that the larger cache may take; None for what it needs.
        recall: rows that each token finds among those evicted, in an archive of all rows that ever
            left the recent ones: the mean over the KV heads, of which few look. None is an eighth
            of heavy and recent rows, at most 256; 0 keeps no archive.
        recall_type: type of the rows in the archive; f16 in the place of q8_0 where a head's row
            is not whole blocks of that.
        recall_mib: most MiB that the archive may take, the oldest rows go. None for a quarter of
            the memory that is free once the model is loaded, divided among the texts of the model,
            but at least 1,024 where that is no more than half of a text's share.
        keep_thoughts: leave an answer's thoughts, between <think> and </think>, in the cache when
            it has ended; otherwise they are dropped then (see `Text.drop_spans`).
    """

    hh: float | int = field(default=0.1, metadata={"saved": "heavy"})
    recent: float | int = 0.1
    pinned: int = 0
    slack: int | None = None
    policy: Policy = field(default=parse_policy(DEFAULT_POLICY))
    positions: Positions = "original"
    attention: Attention = field(default="auto", metadata=_NOT_SAVED)
    score_every: int = field(default=1, metadata=_NOT_SAVED)
    prefill: Prefill = field(default="stream", metadata=_NOT_SAVED)
    prefill_mib: int | None = field(default=None, metadata=_NOT_SAVED)
    recall: float | int | None = None
    recall_type: ArchiveType = "q8_0"
    recall_mib: int | None = field(default=None, metadata=_NOT_SAVED)
    keep_thoughts: bool = field(default=False, metadata=_NOT_SAVED)

    def __post_init__(self) -> None:
        """Refuse what makes no sense with any window.

        Raises:
            SettingsError: a fraction above 1, a negative count, a recent window of 0, or an unknown
                policy.
        """
        object.__setattr__(self, "policy", parse_policy(self.policy))
        for name in ("hh", "recent", "recall"):
            if name != "recall" or self.recall is not None:
                object.__setattr__(self, name, _rows(name, getattr(self, name)))
        if self.recent == 0:
            raise SettingsError(
                "recent is 0, but a token just written must be kept: give recent at least 1 token"
            )
        for name, least, cure in (
            ("pinned", 0, "give a count of 0 or more"),
            ("slack", 1, "give 1 or more cells"),
            ("score_every", 1, "give 1 for all queries, or more"),
            ("prefill_mib", 1, "give 1 or more MiB"),
            ("recall_mib", 1, "give 1 or more MiB"),
        ):
            count = getattr(self, name)
            if count is not None or name in ("pinned", "score_every"):
                object.__setattr__(self, name, check_count(name, count, least=least, cure=cure))
        for name, choices in (
            ("positions", Positions),
            ("prefill", Prefill),
            ("attention", Attention),
            ("recall_type", ArchiveType),
        ):
            value, known = getattr(self, name), get_args(choices)
            if value not in known:
                raise SettingsError(f"{name} is {value!r}: give one of {', '.join(known)}")

    def resolve(self, window: int, n_pos: int, *, on_gpu: bool = False) -> Budget:
        """Row counts for a window of `window` tokens.

        The rows in the cache need a position each. If budget and slack together are more than
        `n_pos`, which a budget of the whole window is, the heavy rows are so many fewer.

        Args:
            window: tokens.
            n_pos: positions for rotary embeddings: those the model was trained on, or of LongRoPE
                those that its factors for this window are for.
            on_gpu: whether layers run on a GPU of this machine.

        Raises:
            SettingsError: the window is too small to keep anything of a text, the budget is larger
                than it or than `n_pos`, or all of it would be found.
        """
        check_window(window)
        heavy, recent = _count(self.hh, window), _count(self.recent, window)
        attended = self.pinned + heavy + recent
        if attended > window:
            raise SettingsError(
                f"the budget of {attended} rows (pinned {self.pinned} + heavy {heavy} + recent "
                f"{recent}) is larger than the window of {window} tokens: lower hh or recent, or "
                "raise n_ctx (--ctx)"
            )
        recall = default_recall(heavy + recent)
        if self.recall is not None:
            recall = _count(self.recall, window)
        if recall >= heavy + recent:
            raise SettingsError(
                f"recall is {recall} rows, of heavy {heavy} + recent {recent}, and at least one "
                "recent row must be kept: lower recall, or raise hh or recent"
            )
        recent -= max(0, recall - heavy)
        heavy = max(0, heavy - recall)
        budget = attended - recall
        slack = self.slack
        if slack is None:
            slack = whole_blocks(budget + max(MIN_SLACK, budget // ROWS_PER_SLACK)) - budget
            if on_gpu:
                slack = max(slack, min(GPU_SLACK, min(window, n_pos) - budget))
        excess = max(0, budget + slack - n_pos)
        if budget > n_pos or excess > heavy:
            raise SettingsError(
                f"the budget of {budget} rows and the slack of {slack} need more positions than "
                f"the {n_pos} the model was trained on: lower hh, recent or slack"
            )
        return Budget(
            self,
            window=window,
            heavy=heavy - excess,
            recent=recent,
            recall=recall,
            slack=slack,
            n_pos=n_pos,
        )


def default_recall(rows: int) -> int:
    """Rows that a token finds by default, of those that it attends to."""
    return min(rows // ROWS_PER_FOUND, MAX_FOUND)


def default_archive_mib(free_bytes: int, n_texts: int) -> int:
    """Most MiB of each text's archive where the settings have no limit (see `recall_mib`)."""
    free = free_bytes // 2**20 // n_texts
    return max(free // 4, min(ARCHIVE_MIB, free // 2), MIN_ARCHIVE_MIB)


def full_cache(settings: EvictionSettings, window: int) -> Budget:
    """What stands for a budget where every row of the window is kept."""
    unpinned = replace(settings, pinned=0)
    return Budget(unpinned, window=window, heavy=0, recent=window, slack=0)


def check_window(window: int) -> None:
    """Refuse a window that is too small to hold anything, with eviction or without.

    Raises:
        SettingsError: with the least there is.
    """
    if window < MIN_WINDOW:
        raise SettingsError(
            f"a window of {window} tokens is too small for any text: give n_ctx (--ctx) at "
            f"least {MIN_WINDOW}, or 0 for the context the model was trained on"
        )


def saved_names() -> dict[str, str]:
    """The settings that a saved cache depends on, each with its name in session files."""
    names = {each.name: each.metadata.get("saved", each.name) for each in fields(EvictionSettings)}
    return {name: saved for name, saved in names.items() if saved is not None}


@dataclass(frozen=True)
class Budget:
    """Settings, and the row counts per (layer, KV head) that they come to for one window.

    Attributes:
        settings: what was asked for.
        window: tokens that fractions refer to.
        heavy, recent, slack: in tokens.
        recall: rows that a token finds among those evicted; heavy and recent ones are without them.
        n_pos: positions for rotary embeddings; 0 for those the model was trained on.
    """

    settings: EvictionSettings
    window: int
    heavy: int
    recent: int
    slack: int
    n_pos: int = 0
    recall: int = 0

    @property
    def pinned(self) -> int:
        """First positions that are never evicted."""
        return self.settings.pinned

    @property
    def policy(self) -> Policy:
        """The policy of the settings, its open parameters closed for so many rows."""
        return self.settings.policy.for_budget(self.rows)

    @property
    def rows(self) -> int:
        """Rows per (layer, KV head) right after a compaction."""
        return self.pinned + self.heavy + self.recent

    @property
    def capacity(self) -> int:
        """Most cells that the text uses at any time."""
        return self.rows + self.slack

    @property
    def cells(self) -> int:
        """Cells llama.cpp allocates for it."""
        return whole_blocks(self.capacity)

    def saved(self) -> dict[str, Any]:
        """What a saved cache depends on, by its names in session files; fit for JSON."""
        counts = {
            "hh": self.heavy + self.recall,  # from which `resolve` takes them again
            "recent": self.recent,
            "slack": self.slack,
            "recall": self.recall,
        }
        values = {**vars(self.settings), **counts, "policy": self.settings.policy.identity}
        return {name: values[setting] for setting, name in saved_names().items()} | {
            "n_pos": self.n_pos
        }


def whole_blocks(cells: int) -> int:
    """Cells that llama.cpp allocates for so many."""
    return math.ceil(cells / CELL_BLOCK) * CELL_BLOCK


def _rows(name: str, value: float | int) -> float | int:
    """Return a fraction of the window, or a count as an `int`; refuse anything else."""
    cure = "give a fraction of the window up to 1.0, or a whole number of tokens"
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    return check_count(name, value, least=0, cure=cure)


def _count(value: float | int, window: int) -> int:
    """A fraction of the window or a count, as a count."""
    if isinstance(value, int):
        return value
    return max(1, int(value * window)) if value > 0 else 0
