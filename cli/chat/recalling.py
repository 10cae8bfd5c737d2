"""Where questions are asked, evicted rows come back for them by default."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from pyh2o.cache.settings import EvictionSettings

from ..options import ModelOptions, RunOptions

Options = TypeVar("Options", bound=ModelOptions)

# A question about what was said long ago is what a chat is for, so rows come back for it.
RECALLING = RunOptions(eviction=EvictionSettings(recall=0.05))
# What is not saved has its archive in memory, of which nobody has been asked.
UNSAVED_MIB = 1024


def with_possible_recall(options: Options, given: Collection[str], *, is_saved: bool) -> Options:
    """The options, with recall by default only where rows are evicted, and limited in memory.

    Args:
        options: the options as they are, with defaults.
        given: names of those that the user typed.
        is_saved: whether the archive is a file.
    """
    eviction = options.eviction
    if options.no_evict and "recall" not in given:
        eviction = replace(eviction, recall=0)
    if not is_saved and eviction.recall_mib is None:
        eviction = replace(eviction, recall_mib=UNSAVED_MIB)
    return replace(options, eviction=eviction)
