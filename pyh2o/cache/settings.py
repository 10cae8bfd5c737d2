"""Eviction settings, and the budget of rows that they resolve to for a window."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..errors import SettingsError
from ..policies import Policy, parse_policy
from ..system.integers import check_count

Attention = Literal["auto", "ops", "portable", "neon", "avx2", "avx512", "avx512bf16"]
Prefill = Literal["stream", "exact"]
ArchiveType = Literal["f32", "f16", "q8_0", "q4_0"]
DEFAULT_POLICY = "h2o-far"

# llama.cpp allocates cells in blocks of this size, so a smaller slack would save no memory.
CELL_BLOCK = 256
# The cost of a compaction is negligible if it runs every MIN_SLACK tokens, or every rows /
# ROWS_PER_SLACK tokens in a larger cache.
MIN_SLACK = 64
ROWS_PER_SLACK = 20
# The slack limits the batch, and smaller batches underuse a GPU.
GPU_SLACK = 512

# A smaller window cannot hold even a question.
MIN_WINDOW = 32

# One of ROWS_PER_RETRIEVED rows that a token attends to is retrieved from the archive. More than
# MAX_RETRIEVED retrieved rows do not improve answers (docs/recall.md).
ROWS_PER_RETRIEVED = 8
MAX_RETRIEVED = 256
# Default size of an archive if that much memory is free, and the minimum that holds a page.
ARCHIVE_MIB = 1024
MIN_ARCHIVE_MIB = 256

# Metadata of settings that may differ when a saved cache is loaded.
_NOT_SAVED: dict[str, Any] = {"saved": None}


@dataclass(frozen=True)
class EvictionSettings:
    """Rows to keep and how. A float from 0 to 1 is a fraction of the window, an int a token count.

    Attributes:
        hh: heavy rows, kept for their score.
        recent: rows of the newest positions, never evicted; at least one. A token attends to hh +
            recent + pinned rows: the retrieved rows of `recall` replace heavy rows first, then
            recent ones.
        pinned: number of first positions that are never evicted.
        slack: cells beyond the budget that fill up between two compactions; 1 is the algorithm of
            the paper. None is 64 or a twentieth of the budget, whichever is larger, plus the rest
            of the last block of cells that llama.cpp allocates. With layers on a local GPU it is at
            least 512, limited by the window.
        policy: the rule that scores rows (see `pyh2o.policies`), or its text, such as
            "snap:queries=32" or "my_file.py:MyPolicy".
        attention: kernel for attention and scores. "auto" is the fastest exact one, and "ops" are
            llama.cpp's own ops. All others raise an error if they cannot be used. Results differ
            only by the order of additions; "avx512bf16" also rounds to bf16 when it reads several
            tokens at once.
        prefill: "stream" reads a text that is longer than the cache in chunks with compactions
            between them; "exact" reads it in a temporarily larger cache, which is compacted once.
        prefill_mib: maximum MiB of the larger cache; None for no limit.
        recall: mean number of rows per KV head that each token retrieves from the archive, which
            has all rows that left the recent window. Only some heads search. None is an eighth of
            the heavy and recent rows, at most 256; 0 turns the archive off.
        recall_type: type of the rows in the archive; q8_0 falls back to f16 if head sizes are not a
            multiple of its blocks.
        recall_mib: maximum MiB of the archive, beyond which the oldest rows are removed. None is a
            quarter of the memory that is free after loading, divided by the number of texts. It is
            at least 1,024 if that is no more than half of a text's share.
        keep_reasoning: keep reasoning (<think> ... </think>) in the cache after the answer;
            otherwise it is dropped (see `Text.drop_spans`).
    """

    hh: float | int = field(default=0.1, metadata={"saved": "heavy"})
    recent: float | int = 0.1
    pinned: int = 0
    slack: int | None = None
    policy: Policy = field(default=parse_policy(DEFAULT_POLICY))
    attention: Attention = field(default="auto", metadata=_NOT_SAVED)
    prefill: Prefill = field(default="stream", metadata=_NOT_SAVED)
    prefill_mib: int | None = field(default=None, metadata=_NOT_SAVED)
    recall: float | int | None = None
    recall_type: ArchiveType = "q8_0"
    recall_mib: int | None = field(default=None, metadata=_NOT_SAVED)
    keep_reasoning: bool = field(default=False, metadata=_NOT_SAVED)

    def __post_init__(self) -> None:
        """Raise a SettingsError if a setting is invalid with any window."""
        object.__setattr__(self, "policy", parse_policy(self.policy))
        for name in ("hh", "recent", "recall"):
            if name != "recall" or self.recall is not None:
                object.__setattr__(self, name, _rows(name, getattr(self, name)))
        if self.recent == 0:
            raise SettingsError(
                "recent is 0, but the newest token must be kept: give recent at least 1 token"
            )
        for name, least, cure in (
            ("pinned", 0, "give a count of 0 or more"),
            ("slack", 1, "give 1 or more cells"),
            ("prefill_mib", 1, "give 1 or more MiB"),
            ("recall_mib", 1, "give 1 or more MiB"),
        ):
            count = getattr(self, name)
            if count is not None or name == "pinned":
                object.__setattr__(self, name, check_count(name, count, least=least, cure=cure))
        for name, choices in (
            ("prefill", Prefill),
            ("attention", Attention),
            ("recall_type", ArchiveType),
        ):
            value, known = getattr(self, name), get_args(choices)
            if value not in known:
                raise SettingsError(f"{name} is {value!r}: give one of {', '.join(known)}")

    def resolve(self, window: int, n_pos: int, *, on_gpu: bool = False) -> Budget:
        """Return the row counts for a window of `window` tokens.

        Each row in the cache needs a position. If budget and slack exceed `n_pos`, for example with
        a budget of the whole window, heavy rows are reduced.

        Args:
            window: tokens.
            n_pos: number of positions for rotary embeddings: the trained context, or with LongRoPE
                the range of its factors for this window.
            on_gpu: whether layers run on a local GPU.

        Raises:
            SettingsError: the window is too small, the budget is larger than the window or `n_pos`,
                or `recall` leaves no recent row.
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
                f"recall of {recall} rows leaves no recent row of heavy {heavy} + recent {recent}: "
                "lower recall, or raise hh or recent"
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
    """Return the default of `recall` for this number of heavy and recent rows."""
    return min(rows // ROWS_PER_RETRIEVED, MAX_RETRIEVED)


def default_archive_mib(free_bytes: int, n_texts: int) -> int:
    """Return the default of `recall_mib`."""
    free = free_bytes // 2**20 // n_texts
    return max(free // 4, min(ARCHIVE_MIB, free // 2), MIN_ARCHIVE_MIB)


def full_cache(settings: EvictionSettings, window: int) -> Budget:
    """Return the budget of a full cache, which keeps every row of the window."""
    unpinned = replace(settings, pinned=0)
    return Budget(unpinned, window=window, heavy=0, recent=window, slack=0)


def check_window(window: int) -> None:
    """Raise a SettingsError if a window is smaller than MIN_WINDOW."""
    if window < MIN_WINDOW:
        raise SettingsError(
            f"a window of {window} tokens is too small: give n_ctx (--ctx) at least {MIN_WINDOW}, "
            "or 0 for the context the model was trained on"
        )


def saved_names() -> dict[str, str]:
    """Return the settings that a saved cache depends on, with their names in session files."""
    names = {each.name: each.metadata.get("saved", each.name) for each in fields(EvictionSettings)}
    return {name: saved for name, saved in names.items() if saved is not None}


@dataclass(frozen=True)
class Budget:
    """Settings, and the row counts per (layer, KV head) that they resolve to for a window.

    Attributes:
        window: tokens that fractions refer to.
        heavy, recent, slack: rows in the cache.
        recall: retrieved rows, in addition to heavy and recent ones.
        n_pos: number of positions for rotary embeddings; 0 for the trained context.
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
        """Number of first positions that are never evicted."""
        return self.settings.pinned

    @property
    def policy(self) -> Policy:
        """The policy, with parameters that depend on the budget filled in."""
        return self.settings.policy.for_budget(self.rows)

    @property
    def rows(self) -> int:
        """Rows per (layer, KV head) right after a compaction."""
        return self.pinned + self.heavy + self.recent

    @property
    def capacity(self) -> int:
        """Maximum number of cells in use: budget plus slack."""
        return self.rows + self.slack

    @property
    def cells(self) -> int:
        """Cells that llama.cpp allocates."""
        return whole_blocks(self.capacity)

    def saved(self) -> dict[str, Any]:
        """Return the settings that a saved cache depends on, by their names in session files."""
        counts = {
            "hh": self.heavy + self.recall,  # `resolve` subtracts recall again
            "recent": self.recent,
            "slack": self.slack,
            "recall": self.recall,
        }
        values = {**vars(self.settings), **counts, "policy": self.settings.policy.identity}
        return {name: values[setting] for setting, name in saved_names().items()} | {
            "n_pos": self.n_pos
        }


def whole_blocks(cells: int) -> int:
    """Return the number of cells rounded up to blocks, as llama.cpp allocates them."""
    return math.ceil(cells / CELL_BLOCK) * CELL_BLOCK


def _rows(name: str, value: float | int) -> float | int:
    """Return a valid fraction or count, or raise a SettingsError."""
    cure = "give a fraction of the window up to 1.0, or a whole number of tokens"
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    return check_count(name, value, least=0, cure=cure)


def _count(value: float | int, window: int) -> int:
    """Return a fraction of the window, or a count, as a count."""
    if isinstance(value, int):
        return value
    return max(1, int(value * window)) if value > 0 else 0
