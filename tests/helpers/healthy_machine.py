"""A machine in whose report there is nothing wrong, whatever this one is like."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyh2o.system import problems, report
from pyh2o.system.products import Products

RIGHT = Products("", right=("F32", "Q4_0"), plain={}, wrong={}, unknown=())


def make_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room on its disk, no GPU that this build cannot use, and a library that is right."""
    monkeypatch.setattr(problems, "LEAST_FREE", 0)
    monkeypatch.setattr(report, "_gpus", lambda: ((), None))
    monkeypatch.setattr(report, "_products", lambda **_: (RIGHT,))
    monkeypatch.setattr(report, "busy_cpus", lambda: 0.4)
    monkeypatch.setattr(report, "_NVIDIA", Path("/nowhere"))
