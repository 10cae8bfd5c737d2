"""A picture of a comparison: speed over the length of the text, and memory."""

from __future__ import annotations

from ..eval.pictures import add_legend, figure_bytes, new_figure
from .figures import Report


def picture(report: Report, file_format: str) -> bytes:
    """The picture as the bytes of a file.

    On the left tokens per second by history, with the range of the rounds as a bar; on the right
    what each cache takes.
    """
    figure = new_figure(13, 6)
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    names: list[str] = []
    kv_bytes: list[int] = []
    colours: list[str] = []
    for index, cache in enumerate(report.caches):
        points = [
            (result.history, figures)
            for result in report.histories
            for figures in result.figures
            if figures.cache == cache.name
        ]
        if not points:
            continue
        speeds = [figures.generated_per_second for _, figures in points]
        colour = f"C{index % 10}"
        speed.errorbar(
            [history for history, _ in points],
            [one.median for one in speeds],
            yerr=(
                [one.median - one.low for one in speeds],
                [one.high - one.median for one in speeds],
            ),
            label=cache.name,
            color=colour,
            marker="osv^D"[index // 10 % 5] if cache.text is None else "*",
            linestyle="--" if cache.kind == "full" else "-",
            capsize=3,
        )
        names.append(cache.name)
        kv_bytes.append(points[-1][1].kv_bytes)
        colours.append(colour)
    speed.set(xlabel="tokens of text before", ylabel="tokens/s generated")
    speed.set_ylim(bottom=0)
    add_legend(speed)
    memory.barh(names, [size / 2**20 for size in kv_bytes], color=colours)
    memory.invert_yaxis()
    memory.set(xlabel="KV cache, MiB")
    figure.suptitle(f"{report.machine['model']} · {report.machine['cpu']}")
    return figure_bytes(figure, file_format)
