"""Prefixes: what of a prompt the cache can reuse, and snapshots to which a text can return."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from ..cache.kv_cache import IntArray
from ..cache.statistics import KVStatistics
from ..errors import PyH2OError
from .prefix_cache import Snapshot
from .text import Text
from .tokens import Tokens, n_common

# Minimum number of tokens that a snapshot must save: taking one costs as much as reading a few
# tokens, and most are never needed.
MIN_SAVED = 32
# Number of snapshots of one owner that must fit the limit: two of a turn, one of the answer that is
# regenerated in case that fails, and one of an earlier turn.
MIN_SNAPSHOTS = 4


def prefix_kept(text: Text, prompt: Tokens) -> int:
    """Return the number of first tokens of a prompt that the cache can reuse."""
    with text.lock:
        at, n_same, n_kept = _same_and_kept(text, prompt)
        is_kept = n_kept == text.n_tokens or text.can_remove_tail(n_kept)
        return int(np.searchsorted(at, min(n_same, n_kept))) if is_kept else 0


def as_in_text(text: Text, prompt: Sequence[int]) -> list[int]:
    """Return the tokens of a text that continues with a prompt, including dropped tokens."""
    n_kept = prefix_kept(text, prompt)
    end = int(text.kept_positions[n_kept - 1]) + 1 if n_kept else 0
    return [*text.tokens[:end].tolist(), *prompt[n_kept:]]


def keep_prefix(text: Text, prompt: Sequence[int]) -> list[int]:
    """Truncate a text to the prefix that a prompt can reuse.

    Dropped spans of the text are not part of a prompt. The text is truncated to a state without
    traces of later tokens, so that the prompt gets the same answer as in an empty cache. Rounding
    may still differ for generated tokens, which were evaluated one by one, and where an earlier
    prompt ended; not with `n_batch=1` and attention="ops". With `recall`, tokens in one batch
    search the archive together, so they may also retrieve other rows.

    Returns:
        the remaining tokens of the prompt; [] if their logits are already there.
    """
    with text.lock:
        at, n_same, n_kept = _same_and_kept(text, prompt)
        for n in (n_kept, min(n_same, n_kept)):
            if n < text.n_tokens and not (n and text.remove_tail(n)):
                text.reset()
        if text.n_tokens == 0:
            text.reset()
        return list(prompt[int(np.searchsorted(at, text.n_tokens)) :])


def _same_and_kept(text: Text, prompt: Tokens) -> tuple[IntArray, int, int]:
    """Return the kept positions, the length of the common prefix, and the length to truncate to."""
    at = text.kept_positions
    n_same = n_common(text.tokens[at], prompt)
    if n_same == len(prompt) and (n_same < len(at) or len(text.logits) == 0):
        n_same = max(0, n_same - 1)  # evaluate the last token again for its logits
    end = text.n_tokens if n_same == len(at) else int(at[n_same - 1]) + 1 if n_same else 0
    while text.is_within_picture(end):
        end -= 1
    return at, end, text.cache.reusable_prefix(end, text.n_tokens)


def cannot_go_back(kv: KVStatistics, n_new: int | None) -> bool:
    """Return whether a text can no longer be truncated to its present length after more tokens.

    It can as long as nothing is evicted, unless it has a recurrent state, or a window that has
    moved on.

    Args:
        kv: statistics of the cache before the new tokens.
        n_new: maximum number of new tokens; None for no limit.
    """
    if kv.bytes_recurrent or not kv.evicting:
        return kv.bytes_recurrent > 0
    return n_new is None or kv.bytes_window > 0 or kv.used + n_new > kv.capacity


def take_snapshot(
    text: Text,
    prompt: IntArray | None = None,
    *,
    owner: object | None = None,
    shared: bool = False,
    is_prompt: bool = False,
) -> None:
    """Store a snapshot of a text in its model's prefix cache, if it fits.

    What returns from it is bit for bit what was there (except for rounding with sliding windows),
    including the archive: a state contains the pages of an archive in memory, and refers to those
    in a file.

    Args:
        text: the text.
        prompt: see `Snapshot`, as for the others; None for all tokens of the text.
    """
    kv, snapshots = text.kv, text.model.snapshots
    in_memory = text.archive is not None and text.archive.is_in_memory
    n_bytes = kv.bytes_total * kv.used // kv.cells + (kv.bytes_archive if in_memory else 0)
    if text.n_tokens == 0 or n_bytes * (MIN_SNAPSHOTS if owner else 1) >= snapshots.max_bytes:
        return
    try:
        tokens, state = text.tokens.copy(), text.kv_state()
    except (PyH2OError, MemoryError):  # an aborted evaluation may have left an incomplete text
        return
    of = None if owner is None else weakref.ref(owner)
    prompt = tokens if prompt is None else prompt
    snapshots.put(Snapshot(tokens, prompt, state, kv.archived, of, shared, is_prompt))


def restore(
    text: Text, tokens: Sequence[int] | IntArray, *, owner: object | None = None, least: int = 0
) -> int:
    """Replace a text by the longest snapshot that some tokens start with.

    A snapshot that cannot be restored is deleted, for example because the file of its archive has
    other pages by now. The next one is tried, or the text becomes empty.

    Args:
        text: the text; it does not change if no snapshot is long enough.
        tokens: the tokens.
        owner: see `PrefixCache.prefixes`.
        least: only a snapshot of more than `least` tokens is tried first.

    Returns:
        the number of restored tokens.
    """
    for snapshot in text.model.snapshots.prefixes(tokens, owner):
        if len(snapshot.prompt) <= least:
            return 0
        if _is_restored(text, snapshot):
            text.model.snapshots.record_use(snapshot)
            return len(snapshot.prompt)
        least = 0
        text.model.snapshots.discard(snapshot)
    return 0


def _is_restored(text: Text, snapshot: Snapshot) -> bool:
    is_complete = False
    try:
        text.load_kv_state(snapshot.state, snapshot.tokens)
        is_complete = text.kv.archived == snapshot.n_archived
    except (PyH2OError, MemoryError):
        pass
    finally:
        if not is_complete:  # Ctrl-C may have left a partial state
            text.reset()
    return is_complete
