"""What `make audit` says of what the database answers, and of what it does not."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

import audit
from audit import FOUND, NOT_CHECKED, findings

SOUND = {"name": "a", "version": "1.0", "vulns": []}
HOLE = {"name": "b", "version": "2.0", "vulns": [{"id": "X-1", "fix_versions": ["2.1", "3.0"]}]}
UNMENDED = {"name": "c", "version": "3.0", "vulns": [{"id": "X-2", "fix_versions": []}]}
SKIPPED = {"name": "d", "skip_reason": "not found"}
OURS = {"name": audit.OURS, "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "lines", "code"),
    [
        ([SOUND, OURS], ["1 of 1 packages checked, 0 known holes"], 0),
        (
            [SOUND, HOLE, UNMENDED, SKIPPED],
            [
                "b 2.0: X-1, mended in 2.1 or 3.0",
                "c 3.0: X-2, not mended yet",
                "d: not checked: not found",
                "3 of 4 packages checked, 2 known holes",
            ],
            FOUND,
        ),
        (
            [SOUND, SKIPPED],
            ["d: not checked: not found", "1 of 2 packages checked, 0 known holes"],
            NOT_CHECKED,
        ),
        ([], ["0 of 0 packages checked, 0 known holes"], NOT_CHECKED),
    ],
)
def test_findings(packages: list[dict[str, Any]], lines: list[str], code: int) -> None:
    assert findings(packages) == (lines, code)


def answer(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> None:
    """Let pip-audit print this."""
    done = subprocess.CompletedProcess([], 1, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


def test_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, json.dumps({"dependencies": [HOLE], "fixes": []}))
    assert audit.main() == FOUND
    assert "b 2.0: X-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [("Traceback\n  ...\nConnectionError: no route\n", "ConnectionError: no route"), ("", "no a")],
)
def test_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stderr: str, reason: str
) -> None:
    """Nothing found is not said where nothing was asked."""
    answer(monkeypatch, "", stderr)
    assert audit.main() == NOT_CHECKED
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nothing was checked, because the database did not answer: run")
    assert reason in output.err
