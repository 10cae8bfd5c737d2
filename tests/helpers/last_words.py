"""A plugin for pytest: the report of a test that ended its process says where that was."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compiled import ROOT, compile_library

SOURCE = ROOT / "tests" / "faults" / "last_words.cpp"


def file_of(worker: dict[str, Any]) -> Path:
    """Where a worker of pytest-xdist writes what it was doing when a signal ended it."""
    return Path(tempfile.gettempdir(), f"pyh2o-{worker['testrunuid']}-{worker['workerid']}")


@pytest.fixture(scope="session", autouse=True)
def last_words(request: pytest.FixtureRequest) -> Iterator[None]:
    """They go to a file: on the screen they would come amid the progress of all workers."""
    if not hasattr(request.config, "workerinput"):
        yield
        return
    path = file_of(request.config.workerinput)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    faulthandler.disable()  # pytest's
    # Python comes first, which knows no native frames before 3.14, and then who was there before.
    with suppress(OSError, subprocess.CalledProcessError):  # where no compiler is
        compile_library("last_words", [SOURCE]).tell_last_words(file)
    faulthandler.enable(file)
    yield
    path.unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport) -> None:
    path = file_of(report.node.workerinput)
    if path.exists():  # no worker has one before its first test
        report.sections.append(("last words", path.read_text(errors="replace")))
        path.unlink()
