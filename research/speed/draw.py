"""Draw docs/speed.svg, the README's picture, from the tables in docs/measurements/speed.md.

python -m research.speed.draw
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXTS = {"Without a text": 0, "After 4,096 tokens": 4096, "After 8,192 tokens": 8192}
CACHES = {
    "full": ("llama.cpp, full cache", "#7f7f7f"),
    "full, flash attention": ("llama.cpp, flash attention", "#bcbcbc"),
    "20 %": ("pyh2o, 20 %", "#d55e00"),
    "10 %": ("pyh2o, 10 %", "#0072b2"),
}
MEMORY, SPEED = "KV, MiB", "decode tok/s"  # columns


def main() -> None:
    page = (DOCS / "measurements" / "speed.md").read_text(encoding="utf-8")
    rows = {text: table(page, text) for text in TEXTS}
    mpl.rcParams["svg.hashsalt"] = "pyh2o"  # equal figures give equal files
    figure, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
    for name, (label, colour) in CACHES.items():
        # the medians in cells such as "36.5 (32.3-36.8)"
        speeds = [float(rows[text][name][SPEED].split()[0]) for text in TEXTS]
        memory = rows["After 8,192 tokens"][name][MEMORY]
        axes.plot(
            list(TEXTS.values()),
            speeds,
            "o-",
            color=colour,
            label=f"{label}: {memory} MiB of KV cache",
        )
    axes.set(xlabel="tokens of text before", ylabel="tokens/s", ylim=(0, 260))
    axes.set_xticks(list(TEXTS.values()), ["0", "4,096", "8,192"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(DOCS / "speed.svg", metadata={"Date": None})


def table(page: str, title: str) -> dict[str, dict[str, str]]:
    """Return the table under a title: for each cache its cells by column."""
    after = page.split(f"**{title}**", 1)[1].split("\n\n**", 1)[0]
    lines = [line.strip("|").split("|") for line in after.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


if __name__ == "__main__":
    main()
