"""What the losses of texts come to: summaries, tables and pictures of fidelity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from .caches import is_streaming
from .measurement import OfCache, Unit, grouped
from .metrics import BLOCK, FloatArray, difference, gap_closed, perplexities, perplexity
from .pictures import add_legend, draw_lines, figure_bytes, new_figure
from .tables import Column, TextTable, column, columns_of, number, table_of

# The gap between sinks and a window and the full cache has to be so many times its standard error:
# a share of nothing but noise would be any number.
CLEAR_GAP = 2

# The heading of a column that is shown only where a cache has an archive.
FOUND = "attention found"


@dataclass(frozen=True, kw_only=True)
class FidelityUnit(Unit):
    """One cache that has read one text. Its arrays are nll, kl and same_top, [tokens - 1] each.

    Attributes:
        text, tokens: which.
        positions, heavy, recent, pinned: of the cache.
        compactions, rebases: while it was read.
        attention: share of the attention that rows got which were found; None for a cache without
            an archive, or where they were not needed.
    """

    text: str
    tokens: int
    positions: str
    heavy: int
    recent: int
    pinned: int
    compactions: int = 0
    rebases: int = 0
    attention: float | None = None


@dataclass(frozen=True, kw_only=True)
class FidelitySummary(OfCache):
    """One cache on one text, over the tokens from `first` on.

    Attributes:
        text, tokens, positions: see FidelityUnit.
        first: first token whose prediction counts.
        perplexity: of all tokens that count.
        nll: their mean loss, in nats.
        nll_to_full, nll_to_full_error: mean difference of the losses to the full cache's at the
            same positions, and its standard error (see metrics.BLOCK); None where there is none.
        nll_to_streaming, nll_to_streaming_error: to those of sinks and a window of the same budget.
        gap_closed: share of what sinks and a window lose in perplexity against the full cache that
            this cache does not lose; None where their loss is not clear (see CLEAR_GAP).
        kl_mean, kl_median, kl_90, kl_99: of KL(full || cache); None without a valid reference.
        same_top: share of positions with the full cache's token on top.
        attention: see FidelityUnit; of the whole text.
        stretches: perplexity of each part of the text; None where no token of it counts.
    """

    text: str
    tokens: int
    positions: str
    first: int
    perplexity: float = field(metadata=column("perplexity", ".2f"))
    nll: float
    nll_to_full: float | None = field(metadata=column("NLL - full", "+±"))
    nll_to_full_error: float | None
    nll_to_streaming: float | None = field(metadata=column("NLL - streaming", "+±"))
    nll_to_streaming_error: float | None
    gap_closed: float | None = field(metadata=column("gap closed", ".0%"))
    kl_mean: float | None = field(metadata=column("KL mean", ".4f"))
    kl_median: float | None = field(metadata=column("KL median", ".4f"))
    kl_90: float | None = field(metadata=column("KL 90 %", ".4f"))
    kl_99: float | None = field(metadata=column("KL 99 %", ".4f"))
    same_top: float | None = field(metadata=column("same top token", ".1%"))
    attention: float | None = field(default=None, metadata=column(FOUND, ".1%"))
    stretches: tuple[float | None, ...]

    @property
    def text_and_cache(self) -> str:
        """Its name where several texts share a table."""
        return f"{self.text}, {self.cache}"


@dataclass(frozen=True, kw_only=True)
class TextsSummary(OfCache):
    """One cache over several texts of one length, each of which counts as much.

    Attributes:
        nll_to_full, kl_mean, same_top: means of those of the texts; None if one has none.
        clear: texts with a gap between sinks and a window and the full cache (see CLEAR_GAP).
        gap_closed: mean of what is closed of these gaps; None without any.
        worst, worst_text: the least of it, and where.
    """

    nll_to_full: float | None = field(metadata=column("NLL - full", "+.4f"))
    gap_closed: float | None = field(metadata=column("gap closed, mean", ".0%"))
    worst: float | None = field(metadata=column("worst", ".0%"))
    worst_text: str = field(metadata=column("worst on"))
    clear: int = field(metadata=column("texts with a gap"))
    kl_mean: float | None = field(metadata=column("KL mean", ".4f"))
    same_top: float | None = field(metadata=column("same top token", ".1%"))


def summed_up(
    unit: FidelityUnit,
    arrays: Mapping[str, Any],
    *,
    first: int,
    stretch: int,
    full: FloatArray | None,
    streaming: FloatArray | None,
) -> FidelitySummary:
    """The figures of one cache on one text.

    Args:
        unit, arrays: what was measured.
        first: first token whose prediction counts.
        stretch: tokens of the parts that have a perplexity of their own.
        full: losses of the full cache, as far as they count; None for itself, or without any.
        streaming: those of sinks and a window of the same budget.
    """
    nll, kl, same_top = (arrays[name][first - 1 :] for name in ("nll", "kl", "same_top"))
    to_full = difference(nll, full, BLOCK)
    to_streaming = difference(nll, None if is_streaming(unit.policy) else streaming, BLOCK)
    quantiles: Sequence[float | None] = [None] * 3
    if kl.size:
        quantiles = [float(value) for value in np.quantile(kl, (0.5, 0.9, 0.99))]
    return FidelitySummary(
        **unit.of_cache(),
        text=unit.text,
        tokens=unit.tokens,
        positions=unit.positions,
        first=first,
        perplexity=perplexity(nll),
        nll=float(nll.mean(dtype=np.float64)),
        nll_to_full=to_full[0],
        nll_to_full_error=to_full[1],
        nll_to_streaming=to_streaming[0],
        nll_to_streaming_error=to_streaming[1],
        gap_closed=_gap_closed(nll, full, streaming),
        kl_mean=float(kl.mean(dtype=np.float64)) if kl.size else None,
        kl_median=quantiles[0],
        kl_90=quantiles[1],
        kl_99=quantiles[2],
        same_top=float(same_top.mean()) if kl.size else None,
        attention=unit.attention,
        stretches=perplexities(arrays["nll"], first, stretch),
    )


def _gap_closed(
    nll: FloatArray, full: FloatArray | None, streaming: FloatArray | None
) -> float | None:
    if full is None:
        return None
    gap, error = (0.0, 0.0) if streaming is None else difference(streaming, full, BLOCK)
    if streaming is None or gap is None or error is None or gap <= CLEAR_GAP * error:
        return None
    return gap_closed(perplexity(full), perplexity(streaming), perplexity(nll))


def over_texts(summaries: Sequence[FidelitySummary]) -> list[TextsSummary]:
    """What the texts of one length come to, cache by cache."""
    return [_over_texts(own) for own in grouped(summaries, lambda one: one.cache).values()]


def _over_texts(summaries: list[FidelitySummary]) -> TextsSummary:
    closed = [(one.gap_closed, one.text) for one in summaries if one.gap_closed is not None]
    worst, worst_text = min(closed, default=(None, ""))
    return TextsSummary(
        **summaries[0].of_cache(),
        nll_to_full=_mean([one.nll_to_full for one in summaries]),
        gap_closed=_mean([share for share, _ in closed]),
        worst=worst,
        worst_text=worst_text,
        clear=len(closed),
        kl_mean=_mean([one.kl_mean for one in summaries]),
        same_top=_mean([one.same_top for one in summaries]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def fidelity_tables(summaries: Sequence[FidelitySummary], stretch: int) -> list[TextTable]:
    """For each length a table of all texts, one of their stretches, and one over the texts."""
    tables = []
    for tokens, own in grouped(summaries, lambda one: one.tokens).items():
        n_texts = len({one.text for one in own})
        names, *figures = columns_of(FidelitySummary)
        if all(one.attention is None for one in own):
            figures = [one for one in figures if one[0] != FOUND]
        if n_texts > 1:
            names = ("text and cache", lambda one: one.text_and_cache)
        title = f"{own[0].text if n_texts == 1 else f'{n_texts} texts'}, {tokens:,} tokens"
        columns = [names, *figures]
        tables.append(table_of(f"{title}, over those from {own[0].first:,} on", own, columns))
        if len(own[0].stretches) > 1:
            columns = [names, *map(_stretch_column, _ends(own[0], stretch), count())]
            tables.append(table_of(f"{title}, perplexity up to token", own, columns))
        if n_texts > 1:
            title = f"{n_texts} texts together, {tokens:,} tokens"
            tables.append(table_of(title, over_texts(own)))
    return tables


def fidelity_picture(summaries: Sequence[FidelitySummary], stretch: int, file_format: str) -> bytes:
    """For each text and length: the loss by budget, and the perplexity of each stretch."""
    shown = grouped(summaries, _text_and_tokens)
    figure = new_figure(13, 5 * max(1, len(shown)))
    axes = figure.subplots(max(1, len(shown)), 2, squeeze=False)
    for ((text, tokens), own), (by_rows, by_token) in zip(shown.items(), axes, strict=False):
        has_kl = all(one.kl_mean is not None for one in own)
        lines = grouped([one for one in own if one.rows], lambda one: one.but_for_budget)
        draw_lines(
            by_rows,
            {
                label: [(one.rows, one.kl_mean if has_kl else one.perplexity) for one in some]
                for label, some in lines.items()
            },
        )
        by_rows.set(
            title=f"{text}, {tokens:,} tokens",
            xlabel="rows",
            ylabel="mean KL to the full cache" if has_kl else "perplexity",
        )
        for one in own:
            values = [float("nan") if value is None else value for value in one.stretches]
            style = "k--" if one.rows == 0 else "-"
            by_token.plot(_ends(one, stretch), values, style, marker="o", label=one.cache)
        by_token.set(xlabel="up to token", ylabel="perplexity of the stretch")
        add_legend(by_token)
    return figure_bytes(figure, file_format)


def _ends(one: FidelitySummary, stretch: int) -> list[int]:
    """Where the stretches end."""
    return [min(one.tokens, (i + 1) * stretch) for i in range(len(one.stretches))]


def _stretch_column(end: int, index: int) -> Column[FidelitySummary]:
    return f"{end:,}", lambda one: number(one.stretches[index], ".2f")


def _text_and_tokens(one: FidelitySummary) -> tuple[str, int]:
    return one.text, one.tokens
