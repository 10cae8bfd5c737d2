"""ggml's products by AMX, compiled by the compilers that are there, on a processor with AMX or not.

Where there is none, the tests do what its instructions do when they trap (amx/tiles.h).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from compiled import ROOT
from pyh2o.library.backends import cpu_library
from pyh2o.library.machine import instruction_sets

SOURCES = Path(__file__).parent / "amx"
COMPILERS = ("g++", "clang++")

# ggml's numbers of the types that its AMX code multiplies
TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 8, "q4_K": 12, "q5_K": 13, "q6_K": 14, "iq4_xs": 23}
# Relative: inputs are rounded to 8 bits.
ROUNDING = 0.015

# Of ggml's variant for these processors, as a wheel has it. Clang 14 calls two of them otherwise.
AVX512 = "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512cd -mavx512vl -mavx512dq -mavx512bw"
VARIANT = f"{AVX512} -mavx512vbmi -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8".split()
DEFINED = ("-D__AMX_TILE__", "-D__AMX_INT8__", "-DNDEBUG")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="no such processor"
)


@pytest.fixture(params=COMPILERS)
def compiler(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip("not on this machine")
    return str(request.param)


@pytest.fixture(scope="module")
def ggml() -> Path:
    """The sources of ggml, patched, where this checkout was built."""
    found = sorted(ROOT.glob("build/*/llama.cpp/ggml"), key=lambda each: each.stat().st_mtime)
    if not found:
        pytest.skip("llama.cpp was built elsewhere")
    return found[-1]


def compiled(program: Path, compiler: str, *arguments: str) -> Path:
    command = [compiler, "-std=c++17", "-w", f"-I{SOURCES}", *arguments, "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
def test_all_of_the_configuration_is_there_when_it_is_loaded(
    tmp_path: Path, ggml: Path, compiler: str, level: str
) -> None:
    """Without the barriers of our patch GCC 12.2 drops the stores of the sizes."""
    text = (ggml / "src" / "ggml-cpu" / "amx" / "mmq.cpp").read_text()
    patterns = (
        r"^#define GGML_AMX_READS\(ptr\) __asm[^\n]*$",
        r"^struct tile_config_t\{.*?^\};$",
        r"^inline void ggml_tile_config_init.*?^\}$",
    )
    parts = [re.search(each, text, re.MULTILINE | re.DOTALL) for each in patterns]
    (tmp_path / "function.h").write_text("\n".join(part[0] for part in parts if part))
    program = compiled(
        tmp_path / "configure",
        compiler,
        *(level, "-mamx-tile", f"-I{tmp_path}", str(SOURCES / "configure.cpp")),
    )
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    sizes = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert sizes == [(8, 64)] * 2 + [(16, 32)] * 2 + [(16, 64)] * 4


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, ggml: Path) -> dict[str, Path]:
    """What multiplies, by the name of its compiler."""
    if not set(instruction_sets()) >= {"avx512vbmi", "avx512_vnni", "avx512_bf16"}:
        pytest.skip("the rest of that code needs AVX-512")
    if os.environ.get("CXXFLAGS"):
        pytest.skip("our library has a sanitizer, which these programs would need, too")
    source = ggml / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    cpu = Path(cpu_library())
    folders = (ggml / "include", ggml / "src", ggml / "src" / "ggml-cpu")
    return {
        compiler: compiled(
            tmp_path_factory.mktemp("amx") / compiler,
            compiler,
            *("-O3", *VARIANT, *DEFINED, *(f"-I{folder}" for folder in folders)),
            *(str(SOURCES / "multiply.cpp"), str(source)),
            *(str(cpu), str(cpu.with_name("libggml-base.so")), f"-Wl,-rpath,{cpu.parent}"),
        )
        for compiler in COMPILERS
        if shutil.which(compiler)
    }


@pytest.mark.parametrize("n_tokens", [1, 2, 17, 40])
@pytest.mark.parametrize("type_name", TYPES)
def test_products(
    programs: dict[str, Path],
    compiler: str,
    rng: np.random.Generator,
    type_name: str,
    n_tokens: int,
) -> None:
    n_out, n_in = 64, 512
    weights = rng.standard_normal((n_out, n_in), dtype=np.float32)
    inputs = rng.standard_normal((n_tokens, n_in), dtype=np.float32)
    weights, outputs = multiplied(programs[compiler], TYPES[type_name], weights, inputs)
    expected = inputs @ weights.T
    error = np.sqrt(np.mean((outputs - expected) ** 2) / np.mean(expected**2))
    assert error < ROUNDING


def multiplied(
    program: Path, ggml_type: int, weights: npt.NDArray[np.float32], inputs: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Weights [n_out, n_in] as the type has them, and inputs [n_tokens, n_in] times them."""
    head = np.array([ggml_type, *weights.shape, len(inputs)], dtype=np.int32)
    given = head.tobytes() + weights.tobytes() + inputs.tobytes()
    result = subprocess.run([program], input=given, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    numbers = np.frombuffer(result.stdout, dtype=np.float32)
    rounded, outputs = numbers[: weights.size], numbers[weights.size :]
    return rounded.reshape(weights.shape), outputs.reshape(len(inputs), len(weights))
