"""Figures of each cache from the losses of texts, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .caches import is_streaming
from .measurement import OF_CACHE, grouped
from .metrics import BLOCK, FloatArray, difference, gap_closed, perplexities, perplexity
from .results import Unit
from .tables import Column, TextTable, column, table_of

# The gap between sinks and a window and the full cache must be this many times its standard error:
# otherwise the closed share would be noise.
CLEAR_GAP = 2

Figures = dict[str, Any]


def summed_up(
    unit: Unit,
    *,
    first: int,
    stretch: int,
    full: FloatArray | None,
    streaming: FloatArray | None,
) -> Figures:
    """Return the figures of one cache on one text, over the tokens from `first` on.

    Args:
        unit: the measurement.
        first: first token whose prediction counts.
        stretch: tokens of the parts with a separate perplexity.
        full: losses of the full cache that count; None for itself, or if there are none.
        streaming: those of sinks and a window of the same budget.

    Returns:
        perplexity and the mean loss `nll` of all tokens that count; nll_to_full, nll_to_streaming
        and their standard errors, from the differences at the same positions; gap_closed, the share
        of the perplexity that sinks and a window lose against the full cache and this cache does
        not, None if their loss is not clear; kl_mean, of KL(full || cache); same_top, the share of
        positions with the full cache's most probable token; stretches, the perplexity of each part,
        None if no token of it counts.
    """
    nll = np.array(unit["nll"], dtype=np.float32)
    kl, same_top = (
        np.array(unit[name], dtype=np.float32)[first - 1 :] for name in ("kl", "same_top")
    )
    counting = nll[first - 1 :]
    to_full = difference(counting, full, BLOCK)
    to_streaming = difference(counting, None if is_streaming(unit["policy"]) else streaming, BLOCK)
    return {
        **unit,
        "first": first,
        "perplexity": perplexity(counting),
        "nll": float(counting.mean(dtype=np.float64)),
        "nll_to_full": to_full[0],
        "nll_to_full_error": to_full[1],
        "nll_to_streaming": to_streaming[0],
        "nll_to_streaming_error": to_streaming[1],
        "gap_closed": _gap_closed(counting, full, streaming),
        "kl_mean": float(kl.mean(dtype=np.float64)) if kl.size else None,
        "same_top": float(same_top.mean()) if kl.size else None,
        "stretches": perplexities(nll, first, stretch),
    }


def _gap_closed(
    nll: FloatArray, full: FloatArray | None, streaming: FloatArray | None
) -> float | None:
    if full is None or streaming is None:
        return None
    gap, error = difference(streaming, full, BLOCK)
    if gap is None or error is None or gap <= CLEAR_GAP * error:
        return None
    return gap_closed(perplexity(full), perplexity(streaming), perplexity(nll))


def over_texts(figures: Sequence[Figures]) -> list[Figures]:
    """Return the means over the texts of one length for each cache; all texts have equal weight.

    `clear` is the number of texts with a clear gap between sinks and a window and the full cache,
    and `worst` the smallest closed share of them.
    """
    found = []
    for own in grouped(figures, lambda one: one["cache"]).values():
        closed = [(one["gap_closed"], one["text"]) for one in own if one["gap_closed"] is not None]
        worst, worst_text = min(closed, default=(None, ""))
        found.append(
            {
                **own[0],
                "nll_to_full": _mean([one["nll_to_full"] for one in own]),
                "gap_closed": _mean([share for share, _ in closed]),
                "worst": worst,
                "worst_text": worst_text,
                "clear": len(closed),
                "kl_mean": _mean([one["kl_mean"] for one in own]),
                "same_top": _mean([one["same_top"] for one in own]),
            }
        )
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if any value is None."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


FIGURES = [
    column("perplexity", "perplexity", ".2f"),
    column("NLL - full", "nll_to_full", "+.4f±"),
    column("NLL - streaming", "nll_to_streaming", "+.4f±"),
    column("gap closed", "gap_closed", ".0%"),
    column("KL mean", "kl_mean", ".4f"),
    column("same top token", "same_top", ".1%"),
    column("attention found", "attention", ".1%"),
]
OVER_TEXTS = [
    column("NLL - full", "nll_to_full", "+.4f"),
    column("gap closed, mean", "gap_closed", ".0%"),
    column("worst", "worst", ".0%"),
    column("worst on", "worst_text"),
    column("texts with a gap", "clear"),
    column("KL mean", "kl_mean", ".4f"),
    column("same top token", "same_top", ".1%"),
]


def fidelity_tables(figures: Sequence[Figures], stretch: int) -> list[TextTable]:
    """Return per length a table of all texts, one of their stretches, and one over the texts."""
    tables = []
    for tokens, own in grouped(figures, lambda one: one["tokens"]).items():
        n_texts = len({one["text"] for one in own})
        name = OF_CACHE[0]
        if n_texts > 1:
            name = ("text and cache", lambda one: f"{one['text']}, {one['cache']}")
        title = f"{own[0]['text'] if n_texts == 1 else f'{n_texts} texts'}, {tokens:,} tokens"
        first = own[0]["first"]
        columns = [name, OF_CACHE[1], *FIGURES]
        tables.append(table_of(f"{title}, over those from {first:,} on", own, columns))
        n_stretches = len(own[0]["stretches"])
        if n_stretches > 1:
            columns = [
                name,
                *(_stretch(i, min(tokens, (i + 1) * stretch)) for i in range(n_stretches)),
            ]
            tables.append(table_of(f"{title}, perplexity up to token", own, columns))
        if n_texts > 1:
            title = f"{n_texts} texts together, {tokens:,} tokens"
            tables.append(table_of(title, over_texts(own), [*OF_CACHE, *OVER_TEXTS]))
    return tables


def _stretch(index: int, end: int) -> Column:
    def text(one: Figures) -> str:
        value = one["stretches"][index]
        return "" if value is None else f"{value:.2f}"

    return f"{end:,}", text
