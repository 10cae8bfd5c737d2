"""Instruction sets of the processor."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest

from pyh2o.library import machine
from pyh2o.library.machine import instruction_sets, missing_sets, used_sets


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", path)
    return path


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ("flags\t\t: fpu sse2 f16c fma avx2 avx512f", ("f16c", "fma", "avx2", "avx512f")),
        ("Features\t: fp asimd asimddp", ("asimd", "asimddp")),
        ("isa\t\t: rv64imafdc", ()),
    ],
)
def test_cpuinfo_of_linux_is_parsed(cpuinfo: Path, line: str, sets: tuple[str, ...]) -> None:
    cpuinfo.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert instruction_sets() == sets


def test_instruction_sets_of_other_systems(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert instruction_sets() == ("asimd",)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert instruction_sets() == ()


def test_missing_instruction_sets_are_named() -> None:
    built_for = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | FMA = 0 | OPENMP = 1 | REPACK = 1 | "
    assert used_sets(built_for) == ("pni", "avx2", "avx512f")
    assert missing_sets(built_for, ("pni", "avx2")) == ("avx512f",)
    assert missing_sets(built_for, ("pni", "avx2", "avx512f")) == ()
    assert missing_sets(built_for, ()) == ()
    assert missing_sets("", ("avx2",)) == ()


def test_this_machine_has_the_instruction_sets_of_the_build() -> None:
    built_for = llama_cpp.llama_print_system_info().decode()
    assert missing_sets(built_for, instruction_sets()) == ()
