"""The figures of one history as a table of texts."""

from __future__ import annotations

from dataclasses import replace

from ..eval.tables import TextTable, columns_of, table_of
from .figures import GPU_MEMORY, RECALLING, Figures, HistoryResult, Report


def head(report: Report) -> str:
    """The machine and the model, and what was asked for."""
    machine, settings = report.machine, report.settings
    speed = report.basis.bytes_per_second
    threads = f"{machine['threads']} thread" + ("" if machine["threads"] == 1 else "s")
    gpus = "".join(f" · {name}" for name in machine["gpus"])
    reads = "" if speed is None else f" reading {speed / 1e9:.1f} GB/s of memory"
    return (
        f"{machine['cpu']}, {threads}{reads}{gpus} · {machine['model']}, "
        f"{machine['model_file_bytes'] / 1e6:.1f} MB · pyh2o {machine['pyh2o']}, llama.cpp "
        f"{machine['llama_cpp_commit']}\n"
        f"instructions that are used: {' '.join(machine['instructions'])}\n"
        f"window {settings['window']}, which every full cache has room for, however short the text "
        f"· at each history {settings['rounds']} rounds of {settings['n']} tokens by turns\n"
    )


def history_table(report: Report, result: HistoryResult) -> TextTable:
    """The figures of a history, below which is said why a cache has none, and what to know.

    The memory of a GPU is shown only where one was used, and what recall takes and brings only
    where a cache has an archive.
    """
    hidden = set() if any(figures.device_bytes for figures in result.figures) else {GPU_MEMORY}
    hidden |= set() if any(cache.recall for cache in report.caches) else {*RECALLING}
    columns = [one for one in columns_of(Figures) if one[0] not in hidden]
    table = table_of(title(report, result), result.figures, columns)
    longest = report.settings["histories"][-1]
    names = [cache.name for cache in report.caches if cache.takes_part(result.history, longest)]
    found = {row[0]: row for row in table.rows}
    failed = [f"{name}: {reason}" for name, reason in report.failures if name not in found]
    empty = ("",) * (len(columns) - 1)
    return replace(
        table,
        rows=tuple(found.get(name, (name, *empty)) for name in names),
        remarks=(*failed, *report.notes),
    )


def title(report: Report, result: HistoryResult) -> str:
    """What the table is about."""
    text = f"After {result.history:,} tokens of text"
    n_rounds = len(result.rounds[0]) if result.rounds else 0
    if 0 < n_rounds < report.settings["rounds"]:
        text += f", stopped after {n_rounds} of {report.settings['rounds']} rounds"
    return text
