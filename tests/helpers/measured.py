"""Shared by the tests of measurements: compared caches, result files, texts."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase

import numpy as np

from research.eval.measurement import CacheSettings
from research.eval.results import ResultFile

TRAINED = 1024
"""Tokens that the tiny model of these tests was trained on."""

CACHES = CacheSettings(("h2o", "streaming"), (0.25, 100))


def random_text(rng: np.random.Generator, n: int) -> str:
    return "".join(rng.choice([*ascii_lowercase, " "], size=n).tolist())


def results(path: Path | None = None) -> ResultFile:
    return ResultFile(path, "x", {"--seed": 1}, {"cpu": "a"})


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all Markdown tables without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] not in ("cache", "text and cache", "---")]
