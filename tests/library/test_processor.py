"""What a processor can do, and which kernel attends on it."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest

from pyh2o.library import machine
from pyh2o.library.machine import attention_kernel, instruction_sets, missing_sets, used_sets
from tiny_gguf import write_tiny_gguf
from tiny_llama import exact_kernels


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", path)
    return path


@pytest.mark.parametrize(
    ("line", "sets", "kernel"),
    [
        ("flags\t\t: fpu sse2 f16c fma avx2 avx512f", ("f16c", "fma", "avx2", "avx512f"), "avx512"),
        ("flags\t\t: avx2 fma f16c bmi2", ("f16c", "fma", "avx2", "bmi2"), "avx2"),
        ("flags\t\t: avx avx2", ("avx", "avx2"), "portable"),
        ("Features\t: fp asimd asimddp", ("asimd", "asimddp"), "neon"),
        ("isa\t\t: rv64imafdc", (), None),
    ],
)
def test_what_linux_tells(cpuinfo: Path, line: str, sets: tuple[str, ...], kernel: str) -> None:
    cpuinfo.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert instruction_sets() == sets
    assert attention_kernel(sets) == kernel


def test_other_systems(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert attention_kernel(instruction_sets()) == "neon"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert instruction_sets() == ()


def test_the_kernel_is_the_one_that_the_library_chooses(tmp_path: Path) -> None:
    """It takes the fastest exact one that this machine can run."""
    sets = instruction_sets()
    if not sets:
        pytest.skip("the system does not tell what its processor can do")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    assert attention_kernel(sets) == exact_kernels(path)[-1]


def test_instructions_that_are_missing() -> None:
    built_for = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | FMA = 0 | OPENMP = 1 | REPACK = 1 | "
    assert used_sets(built_for) == ("pni", "avx2", "avx512f")
    assert missing_sets(built_for, ("pni", "avx2")) == ("avx512f",)
    assert missing_sets(built_for, ("pni", "avx2", "avx512f")) == ()
    assert missing_sets(built_for, ()) == ()
    assert missing_sets("", ("avx2",)) == ()


def test_this_machine_has_what_the_library_was_built_for() -> None:
    built_for = llama_cpp.llama_print_system_info().decode()
    assert missing_sets(built_for, instruction_sets()) == ()
