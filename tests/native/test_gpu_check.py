"""The GPU check script on a machine without a GPU, with a mock GPU and tiny models."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import gpu_check
from compiled import ROOT
from gpu_figures import COMPARISONS, speed_checks
from gpu_plan import Check, Plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Two short tests.
SOME = "[composed-h2o-3] or [5-f16-auto-kqv-64]"


def run_check(folder: Path, *arguments: str) -> tuple[int, dict[str, list[str]], str]:
    """Return the exit code, the table's cells by line name, and the whole output."""
    done = subprocess.run(
        [sys.executable, gpu_check.__file__, "run", str(folder), "--mock", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    table = done.stdout.partition("| check | result |")[2]
    lines = [re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines()[2:]]
    return done.returncode, {name: cells for name, *cells in lines}, said


def test_every_step_reports_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(
        '#!/bin/sh\nwhile [ "$1" != "${1#--}" ]; do shift 2; done\n'
        'echo "========= ERROR SUMMARY: 0 errors"\nexec "$@"\n'
    )
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, table, said = run_check(tmp_path / "check", "-k", SOME)
    assert code == 0, said
    assert {cells[-1] for cells in table.values()} == {""}
    expected = {
        "GPU and package",
        "rows on a device equal the reference",
        "layers split between a device and the cpu equal the host",
        "all tests of devices",
        "greedy text of tiny.gguf",
        *(f"compute-sanitizer memcheck, {case}" for case in ("state", "search")),
        *("search 2 pages, 1 tokens, 8 rows, pinned", "search 3 pages, 20 tokens, 32 rows, pinned"),
        *("attend 128 cells, 4 query heads", "archive 20 tokens", "pinned allocation"),
        *("zero-copy read of pinned memory", "read of device memory"),
        *(
            f"{cache}, after {history} tokens: {verb}"
            for cache in ("full, flash attention", "20 %", "20 %, no recall")
            for history in ("8,192", "32,768")
            for verb in ("reads", "writes")
        ),
        "100 %, no recall, after 32,768 tokens: writes",
        *(
            f"profile, 20 %, recall, after 300 tokens: {what}"
            for what in ("512 tokens at once", "64 tokens one by one", "a token with a compaction")
        ),
        "profile, full, after 300 tokens: 64 tokens one by one",
    }
    assert expected <= set(table)
    assert table["rows on a device equal the reference"][0] == "1 of 1"
    assert "40 of 40 choices" in table["greedy text of tiny.gguf"][0]
    compacted = table["profile, 20 %, recall, after 300 tokens: a token with a compaction"][0]
    assert compacted.endswith("1 compactions")
    report = (tmp_path / "check" / "report.md").read_text()
    assert all(f"| {name} |" in report for name in table)
    assert "Predicted for an RTX 4090" in report


def test_a_failed_step_is_reported_and_the_others_run(tmp_path: Path) -> None:
    code, table, said = run_check(tmp_path, "--only", "tests", "kernels", "-k", "no_such_test")
    assert code == 1
    assert [name for name, cells in table.items() if cells[-1]] == ["all tests of devices"], said
    assert "archive 20 tokens" in table


def plan_of(folder: Path) -> Plan:
    return Plan(folder, "gpu", ["tests"], "", None, "llama-3-8b")


def test_a_step_that_times_out_is_reported(tmp_path: Path) -> None:
    def slow(plan: Plan) -> Iterator[Check]:
        yield Check("before", "1 us")
        done = plan.finished("sh", "-c", "echo so far; sleep 60")
        yield Check("slow", f"{done.last_line} after {done.stdout.strip()}", "there", done.ok)

    def broken(plan: Plan) -> Iterator[Check]:
        yield from [][0]

    plan = plan_of(tmp_path)
    gpu_check.take(plan, "slow", slow, due=0)
    gpu_check.take(plan, "broken", broken, due=0)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "| before | 1 us |  |  |" in lines
    assert "| slow | ended after 1 s, its limit after so far | there | **failed** |" in lines
    assert "| broken | IndexError: list index out of range |  | **failed** |" in lines


def test_required_speeds_are_checked() -> None:
    def figures(cache: str, read: float, ratio: float) -> dict[str, object]:
        speeds = {"read_per_second": read, "ratio": {"median": ratio}}
        generated = {"generated_per_second": {"median": 100 * ratio}}
        return {"cache": cache, "is_full": cache == "full", **speeds, **generated}

    asked = COMPARISONS[0]
    result = {"figures": [figures("full", 4000, 1.0), figures("20 %", 3000, 1.4)]}
    checks = [check for after in (8192, 32768) for check in speed_checks(result, asked, after)]
    assert [(check.name, check.must, check.passed) for check in checks if check.must] == [
        ("20 %, after 8,192 tokens: reads", ">= 0.8x", False),
        ("20 %, after 8,192 tokens: writes", ">= 0.9x", True),
        ("20 %, no recall, after 8,192 tokens", "measured", False),
        ("20 %, after 32,768 tokens: reads", ">= 1.0x", False),
        ("20 %, after 32,768 tokens: writes", ">= 1.3x", True),
        ("20 %, no recall, after 32,768 tokens", "measured", False),
    ]
    nothing = speed_checks({"figures": []}, asked, 8192)
    assert [check.passed for check in nothing] == [False, False]


def test_the_bundle_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: it has the programs, the files and every package that pyh2o needs."""
    commands: list[list[str]] = []

    def call(*command: object, **environment: str) -> None:
        commands.append([str(part) for part in command])
        (tmp_path / "llama.cpp").mkdir(exist_ok=True)
        (tmp_path / "wheels").mkdir(exist_ok=True)
        for name in ("platformdirs", "patch_ng"):
            (tmp_path / "wheels" / f"{name}-4-py3-none-any.whl").touch()
        if "native/prepare_llama_cpp.py" in commands[-1]:  # which a fresh Python runs, too
            assert environment["PYTHONPATH"].endswith("patch_ng-4-py3-none-any.whl")

    monkeypatch.setattr(gpu_check, "call", call)
    gpu_check.carry(tmp_path, "3.12")
    download, wheel, prepare = commands
    done = subprocess.run(
        [*prepare, "--prepared"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "does not hold the llama.cpp of this checkout" in done.stderr
    assert (ROOT / wheel[-1]).exists()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    needed += metadata.requires("llama-cpp-python") or []
    assert names_of(needed) <= names_of(download) | {"llama-cpp-python"}


def names_of(requirements: list[str]) -> set[str]:
    """Return the names of packages that every Python needs."""
    needed = [text.replace("_", "-") for text in requirements if ";" not in text]
    return {re.split("[^a-z0-9-]", text)[0] for text in needed}
