"""How many examples each property gets, and a summary after a long run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tries import Tries


@pytest.fixture
def tries(seed: int, request: pytest.FixtureRequest) -> Iterator[Tries]:
    """The number of examples per property."""
    tries = Tries(seed)
    yield tries
    request.node.user_properties.append(("tried", tries.n))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many examples were tried, if a number was requested."""
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
