"""The check for machines with a GPU, on a machine without: a GPU that is none, tiny models."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gpu_check
from compiled import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Of the tests two that take little.
SOME = "[composed-h2o-3] or [5-f16-auto-kqv-64]"


def run_check(folder: Path, *arguments: str) -> tuple[int, dict[str, list[str]], str]:
    """The exit code, the cells of the table by the names of its lines, and all that it says."""
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


def test_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    tests = {
        "rows on a device are those of the reference",
        "layers that a device shares with the cpu",
        "all tests of devices",
        "greedy text of tiny.gguf",
    }
    tests |= {f"compute-sanitizer {tool}" for tool in ("memcheck", "racecheck")}
    for cache in ("20 %, no recall", "20 %, recall 2.5 %", "100 %, no recall"):
        tests.add(f"{cache}, after 64 tokens: speed")
    assert {name for name in table if "compactions" not in name and "memory" not in name} == tests
    assert table["rows on a device are those of the reference"][0] == "1 of 1"


def test_what_fails_is_a_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    code, table, said = run_check(tmp_path, "--only", "tests", "text", "-k", "no_such_test")
    assert code == 1
    assert [name for name, cells in table.items() if cells[-1]] == ["all tests of devices"], said
    assert "200 of 200 choices" in table["greedy text of tiny.gguf"][0]


def test_what_is_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: the programs and files are there, and so is all that pyh2o needs."""
    commands: list[list[str]] = []

    def call(*command: object) -> None:
        commands.append([str(part) for part in command])
        (tmp_path / "llama.cpp").mkdir(exist_ok=True)

    monkeypatch.setattr(gpu_check, "call", call)
    gpu_check.carry(tmp_path, "3.12")
    prepare, wheel, download = commands
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
    """Of those that every Python needs."""
    needed = [text.replace("_", "-") for text in requirements if ";" not in text]
    return {re.split("[^a-z0-9-]", text)[0] for text in needed}
