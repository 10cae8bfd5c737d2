"""Prefixes: what two texts have in common, and what of a text in a cache a prompt can reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..cache.kv_cache import IntArray
    from .text import Text

Tokens = Sequence[int] | npt.NDArray[Any]


def n_common(a: Tokens, b: Tokens) -> int:
    """How many of the first tokens, or bytes, of two texts are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if differ.size else n


def prefix_kept(text: Text, prompt: Tokens) -> int:
    """How many tokens of a prompt the cache holds and can reuse; the others are read anew."""
    with text.lock:
        at, n_same, n_kept = _same_and_kept(text, prompt)
        is_kept = n_kept == text.n_tokens or text.can_remove_tail(n_kept)
        return int(np.searchsorted(at, min(n_same, n_kept))) if is_kept else 0


def as_in_text(text: Text, prompt: Sequence[int]) -> list[int]:
    """The tokens of a text that goes on as a prompt says: with those that it has forgotten."""
    n_kept = prefix_kept(text, prompt)
    end = int(text.kept_positions[n_kept - 1]) + 1 if n_kept else 0
    return [*text.tokens[:end].tolist(), *prompt[n_kept:]]


def keep_prefix(text: Text, prompt: Sequence[int]) -> list[int]:
    """Shorten a text to the prefix that a prompt can reuse.

    What the text has forgotten is no part of a prompt: one that has all the rest of the text goes
    on from there.

    So much stays as can be had as if nothing had ever come after it. So the tokens that are drawn
    are those that the prompt alone would get, whatever was here before. Two things may still round
    differently: text that the model has written itself, which it read one token at a time, and the
    place where an earlier prompt ended that this one goes on from. With `n_batch=1` and
    attention="ops" they do not. With `recall`, tokens that are read at once look for evicted rows
    together: there they may also find others.

    Returns:
        the tokens of the prompt that are still to be evaluated; none if the logits behind it are
        there.
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
    """What the prompt has of the text, and how short that has to become first.

    Returns:
        The positions of what the text remembers, how long a beginning of it the prompt has, and the
        length to set it back to.
    """
    at = text.kept_positions
    n_same = n_common(text.tokens[at], prompt)
    if n_same == len(prompt) and (n_same < len(at) or len(text.logits) == 0):
        n_same = max(0, n_same - 1)  # the last one gives the logits
    end = text.n_tokens if n_same == len(at) else int(at[n_same - 1]) + 1 if n_same else 0
    while text.is_within_picture(end):
        end -= 1
    return at, end, text.cache.reusable_prefix(end, text.n_tokens)
