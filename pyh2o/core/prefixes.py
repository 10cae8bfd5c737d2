"""Common prefixes of texts, and the cached prefix that a prompt can reuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache.kv_cache import IntArray
from .text import Text
from .tokens import Tokens, n_common


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
