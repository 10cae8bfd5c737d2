"""The figures of a measurement as tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..tables import TextTable
from .fidelity import FidelitySummary
from .instructions import InstructionSummary
from .recall import RecallSummary
from .stories import StorySummary

# Between two compactions a cache fills up its slack.
ROWS = "rows (at most)"

FIDELITY = (
    "cache",
    ROWS,
    "perplexity",
    "NLL - full",
    "NLL - streaming",
    "gap closed",
    "KL mean",
    "median",
    "90 %",
    "99 %",
    "same top token",
)
RECALL = ("cache", ROWS, "question", "score", "of full", "NLL of the answer", "NLL - full")
INSTRUCTIONS = (
    "cache",
    ROWS,
    "system prompt",
    "followed",
    "first turn",
    "last turn",
    "right answer likelier",
    "margin - full",
    "prompt leaked",
    "defence first",
    "defence last",
    "secret leaked",
)
STORIES = (
    "cache",
    ROWS,
    "self-BLEU",
    "distinct-1",
    "distinct-2",
    "distinct-3",
    "repeated 4-grams",
    "loops",
    "perplexity",
    "NLL",
)


def fidelity_tables(summaries: Sequence[FidelitySummary], stretch: int) -> list[TextTable]:
    """A table for each text and length, and one of its stretches where it has several."""
    tables = []
    for text, tokens in dict.fromkeys((one.text, one.tokens) for one in summaries):
        own = [one for one in summaries if (one.text, one.tokens) == (text, tokens)]
        tables.append(
            TextTable(
                f"{text}, {tokens:,} tokens, over those from {own[0].first:,} on",
                FIDELITY,
                tuple(_fidelity_row(one) for one in own),
            )
        )
        n_stretches = len(own[0].stretches)
        if n_stretches > 1:
            ends = [min(tokens, (i + 1) * stretch) for i in range(n_stretches)]
            tables.append(
                TextTable(
                    f"{text}, {tokens:,} tokens, perplexity up to token",
                    ("cache", *(f"{end:,}" for end in ends)),
                    tuple(
                        (one.cache, *(_number(value, ".2f") for value in one.stretches))
                        for one in own
                    ),
                )
            )
    return tables


def _fidelity_row(one: FidelitySummary) -> tuple[str, ...]:
    return (
        one.cache,
        _rows(one.rows, one.capacity),
        f"{one.perplexity:.2f}",
        _with_error(one.nll_to_full, one.nll_to_full_error),
        _with_error(one.nll_to_streaming, one.nll_to_streaming_error),
        _number(one.gap_closed, ".0%"),
        *(_number(kl, ".4f") for kl in (one.kl_mean, one.kl_median, one.kl_90, one.kl_99)),
        _number(one.same_top, ".1%"),
    )


def recall_tables(summaries: Sequence[RecallSummary]) -> list[TextTable]:
    """A table for each task and length."""
    tables = []
    for task, tokens in dict.fromkeys((one.task, one.tokens) for one in summaries):
        own = [one for one in summaries if (one.task, one.tokens) == (task, tokens)]
        name = "all tasks" if task == "all" else task
        samples = max(one.samples for one in own)
        tables.append(
            TextTable(
                f"{name}, {tokens:,} tokens, {samples} sample{'' if samples == 1 else 's'}",
                RECALL,
                tuple(
                    (
                        one.cache,
                        _rows(one.rows, one.capacity),
                        one.question,
                        f"{one.score:.1f}",
                        _number(one.score_of_full, ".0%"),
                        f"{one.nll:.3f}",
                        _with_error(one.nll_to_full, one.nll_to_full_error),
                    )
                    for one in own
                ),
            )
        )
    return tables


def instruction_tables(summaries: Sequence[InstructionSummary]) -> list[TextTable]:
    """One table, or none if nothing was measured."""
    if not summaries:
        return []
    samples = max(one.samples for one in summaries)
    return [
        TextTable(
            f"{len(summaries[0].by_turn)} turns, {samples} dialogue{'' if samples == 1 else 's'}",
            INSTRUCTIONS,
            tuple(
                (
                    one.cache,
                    _rows(one.rows, one.capacity),
                    {"system": "pinned", "none": "not pinned"}.get(one.pin, ""),
                    f"{one.followed:.1%}",
                    f"{one.by_turn[0]:.1%}",
                    f"{one.by_turn[-1]:.1%}",
                    f"{one.preferred:.1%}",
                    _with_error(one.margin_to_full, one.margin_to_full_error),
                    f"{one.leaked:.1%}",
                    _number(one.leaked_defence_first, ".1%"),
                    _number(one.leaked_defence_last, ".1%"),
                    f"{one.secret_leaked:.1%}",
                )
                for one in summaries
            ),
        )
    ]


def story_tables(summaries: Sequence[StorySummary], tokens: int) -> list[TextTable]:
    """One table, or none if nothing was measured."""
    if not summaries:
        return []
    samples = max(one.samples for one in summaries)
    return [
        TextTable(
            f"{samples} {'story' if samples == 1 else 'stories'} of {tokens:,} tokens",
            STORIES,
            tuple(
                (
                    one.cache,
                    _rows(one.rows, one.capacity),
                    _number(one.self_bleu, ".3f"),
                    _number(one.distinct_1, ".3f"),
                    _number(one.distinct_2, ".3f"),
                    _number(one.distinct_3, ".3f"),
                    _number(one.repeated_4, ".1%"),
                    str(one.loops),
                    f"{one.perplexity:.2f}",
                    _with_error(one.nll, one.nll_error, sign=""),
                )
                for one in summaries
            ),
        )
    ]


def _rows(rows: int, capacity: int) -> str:
    return f"{rows} ({capacity})" if rows else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _with_error(value: float | None, error: float | None, sign: str = "+") -> str:
    if value is None:
        return ""
    shown = f"{value:{sign}.4f}"
    return shown if error is None else f"{shown} ± {error:.4f}"
