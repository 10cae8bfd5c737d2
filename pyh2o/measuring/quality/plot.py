"""Pictures of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..pictures import figure_bytes, new_figure
from .fidelity import FidelitySummary
from .instructions import InstructionSummary
from .recall import RecallSummary
from .stories import StorySummary


def fidelity_picture(summaries: Sequence[FidelitySummary], stretch: int, file_format: str) -> bytes:
    """For each text and length: the loss by budget, and the perplexity of each stretch."""
    shown = list(dict.fromkeys((one.text, one.tokens) for one in summaries))
    figure = new_figure(13, 5 * max(1, len(shown)))
    axes = figure.subplots(max(1, len(shown)), 2, squeeze=False)
    for (text, tokens), (by_rows, by_token) in zip(shown, axes, strict=False):
        own = [one for one in summaries if (one.text, one.tokens) == (text, tokens)]
        has_kl = all(one.kl_mean is not None for one in own)
        for label, some in _by_policy(own).items():
            points = [(one.rows, one.kl_mean if has_kl else one.perplexity) for one in some]
            points.sort()
            by_rows.plot(*zip(*points, strict=True), marker="o", label=label)
        for one in own:
            ends = [min(tokens, (i + 1) * stretch) for i in range(len(one.stretches))]
            values = [float("nan") if value is None else value for value in one.stretches]
            style = "k--" if one.rows == 0 else "-"
            by_token.plot(ends, values, style, marker="o", label=one.cache)
        by_rows.set(xlabel="rows", ylabel="mean KL to the full cache" if has_kl else "perplexity")
        by_rows.set_title(f"{text}, {tokens:,} tokens")
        by_rows.set_ylim(bottom=0)
        by_token.set(xlabel="up to token", ylabel="perplexity of the stretch")
        _legend(by_rows)
        _legend(by_token)
    return figure_bytes(figure, file_format)


def recall_picture(summaries: Sequence[RecallSummary], file_format: str) -> bytes:
    """Scores and losses by budget: those of all tasks together where there are several."""
    tasks = {one.task for one in summaries}
    own = [one for one in summaries if one.task == "all" or len(tasks) == 1]
    figure = new_figure(13, 6)
    scores, losses = figure.subplots(1, 2)
    lines: dict[str, list[RecallSummary]] = {}
    for one in own:
        if one.rows:
            label = f"{one.policy}, question {one.question}, {one.tokens:,} tokens"
            lines.setdefault(label, []).append(one)
    for axis, name in ((scores, "score"), (losses, "nll")):
        for label, some in lines.items():
            points = sorted((one.rows, getattr(one, name)) for one in some)
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        for one in own:
            if not one.rows:
                axis.axhline(
                    getattr(one, name), color="k", linestyle="--", label=f"full, {one.tokens:,}"
                )
        axis.set_ylim(bottom=0)
        _legend(axis)
    scores.set(xlabel="rows", ylabel="score, %")
    losses.set(xlabel="rows", ylabel="NLL of the right answer, per token")
    return figure_bytes(figure, file_format)


def instruction_picture(summaries: Sequence[InstructionSummary], file_format: str) -> bytes:
    """The share of instructions that are followed, turn by turn, and what leaked in the end."""
    figure = new_figure(13, 6)
    turns, leaks = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = []
    for one in summaries:
        pin = {"system": ", pinned", "none": ", not pinned"}.get(one.pin, "")
        labels.append(one.cache + pin)
        style = "k--" if one.rows == 0 else "-"
        turns.plot(
            range(1, len(one.by_turn) + 1),
            [100 * share for share in one.by_turn],
            style,
            marker="o",
            label=labels[-1],
        )
    leaks.barh(labels, [100 * one.leaked for one in summaries])
    leaks.invert_yaxis()
    turns.set(xlabel="turn", ylabel="instructions followed, %")
    turns.set_ylim(bottom=0)
    leaks.set(xlabel="system prompt leaked, % (ROUGE-L recall)")
    _legend(turns)
    return figure_bytes(figure, file_format)


def story_picture(summaries: Sequence[StorySummary], file_format: str) -> bytes:
    """Perplexity under the full cache, and repetition, of each cache's stories."""
    figure = new_figure(13, 6)
    likelihood, repetition = figure.subplots(1, 2)
    names = [one.cache for one in summaries]
    likelihood.barh(names, [one.perplexity for one in summaries])
    repetition.barh(names, [100 * (one.repeated_4 or 0.0) for one in summaries])
    for axis in (likelihood, repetition):
        axis.invert_yaxis()
    likelihood.set(xlabel="perplexity under the full cache")
    repetition.set(xlabel="repeated 4-grams, %")
    return figure_bytes(figure, file_format)


def _by_policy(summaries: Sequence[FidelitySummary]) -> dict[str, list[FidelitySummary]]:
    """Caches with rows, those that differ in their budget only on one line."""
    lines: dict[str, list[FidelitySummary]] = {}
    for one in summaries:
        if one.rows:
            dense = ", dense" if one.positions == "dense" else ""
            lines.setdefault(f"{one.policy}{dense}", []).append(one)
    return lines


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")
