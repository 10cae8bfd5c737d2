"""The figures of one history as a table of texts."""

from __future__ import annotations

from ..tables import TextTable
from .results import Figures, HistoryResult, Range, Report

GPU_HEADING = "GPU MiB"
HEADINGS = (
    "cache",
    "KV memory",
    "of full",
    "peak MiB",
    GPU_HEADING,
    "read tok/s",
    "first token s",
    "generate tok/s (range)",
    "x full (range)",
    "compactions, % of time",
    "of roofline",
)


def head(report: Report) -> str:
    """Two lines: the machine and the model, and what was asked for."""
    machine, settings = report.machine, report.settings
    speed = report.basis.bytes_per_second
    threads = f"{machine['threads']} thread" + ("" if machine["threads"] == 1 else "s")
    gpus = "".join(f" · {name}" for name in machine["gpus"])
    reads = "" if speed is None else f" reading {speed / 1e9:.1f} GB/s of memory"
    return (
        f"{machine['cpu']}, {threads}{reads}{gpus} · {machine['model']}, "
        f"{machine['model_file_bytes'] / 1e6:.1f} MB · pyh2o {machine['pyh2o']}, llama.cpp "
        f"{machine['llama_cpp_commit']}\n"
        f"window {settings['window']} · at each history {settings['rounds']} rounds of "
        f"{settings['n']} tokens by turns\n"
    )


def history_table(report: Report, result: HistoryResult) -> TextTable:
    """The figures of a history."""
    return TextTable(
        title(report, result),
        headings(result),
        tuple(rows(report, result)),
        tuple(remarks(report, result)),
    )


def headings(result: HistoryResult) -> tuple[str, ...]:
    """Names of the columns; the memory of a GPU only where one was used."""
    return tuple(name for name in HEADINGS if name != GPU_HEADING or _on_gpu(result))


def _on_gpu(result: HistoryResult) -> bool:
    return any(figures.device_bytes for figures in result.figures)


def title(report: Report, result: HistoryResult) -> str:
    """What the table is about."""
    text = f"After {result.history:,} tokens of text"
    n_rounds = len(result.rounds[0]) if result.rounds else 0
    if 0 < n_rounds < report.settings["rounds"]:
        text += f", stopped after {n_rounds} of {report.settings['rounds']} rounds"
    return text


def rows(report: Report, result: HistoryResult) -> list[tuple[str, ...]]:
    """A row for each cache that takes part, in the order of the headings; empty if given up."""
    longest = report.settings["histories"][-1]
    found = {figures.cache: figures for figures in result.figures}
    return [
        _row(cache.name, found.get(cache.name), headings(result))
        for cache in report.caches
        if cache.takes_part(result.history, longest)
    ]


def remarks(report: Report, result: HistoryResult) -> list[str]:
    """What has to be said below the table: why cells are empty, and notes."""
    missing = {row[0] for row in rows(report, result) if not any(row[1:])}
    failed = [f"{name}: {reason}" for name, reason in report.failures if name in missing]
    return [*failed, *report.notes]


def _row(name: str, figures: Figures | None, names: tuple[str, ...]) -> tuple[str, ...]:
    if figures is None:
        return (name, *[""] * (len(names) - 1))
    reading = figures.read_per_second
    cells = (
        name,
        f"{figures.kv_bytes / 2**20:.1f} MiB",
        f"{figures.share_of_full:.1%}",
        f"{figures.peak_bytes / 2**20:.0f}",
        f"{figures.device_bytes / 2**20:.0f}",
        "" if reading is None else f"{reading:.0f}",
        f"{figures.first_token_seconds:.2f}",
        _range(figures.generated_per_second, ".1f"),
        "" if figures.ratio is None else _range(figures.ratio, ".2f"),
        f"{figures.compactions}, {figures.compaction_share:.1%}" if figures.compactions else "",
        "" if figures.roofline_share is None else f"{figures.roofline_share:.0%}",
    )
    return tuple(cell for name, cell in zip(HEADINGS, cells, strict=True) if name in names)


def _range(value: Range, form: str) -> str:
    return f"{value.median:{form}} ({value.low:{form}}-{value.high:{form}})"
