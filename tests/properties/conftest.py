"""How often each property is tried, and the numbers at the end of a long run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tries import Tries


@pytest.fixture
def tries(seed: int, request: pytest.FixtureRequest) -> Iterator[Tries]:
    """Tries to break properties."""
    tries = Tries(seed)
    yield tries
    request.node.user_properties.append(("tried", tries.n))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many examples were tried, where somebody has asked for many."""
    if "PYH2O_EXAMPLES" not in os.environ:
        return
    tried = {
        report.nodeid.rpartition("/")[2]: n
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, n in getattr(report, "user_properties", ())
        if name == "tried"
    }
    terminalreporter.section("tried")
    for name, n in tried.items():
        terminalreporter.write_line(f"{n:12,}  {name}")
    terminalreporter.write_line(f"{sum(tried.values()):12,}  in all")
