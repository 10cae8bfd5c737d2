"""Trying the library in another process."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from pyh2o import _native  # noqa: F401  # loads the library
from pyh2o.system import trial
from pyh2o.system.trial import why_not_loaded


def test_it_is_loaded_here_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("another process"))
    assert why_not_loaded() is None


def test_another_process_loads_it() -> None:
    assert trial._how_it_ends() is None


def test_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert trial._how_it_ends() == f"it takes more than {trial.PATIENCE} seconds"
