"""ggml's AMX tile sizes are stored before they are loaded, whatever the compiler optimises."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compiled import ROOT

PROGRAM = Path(__file__).parent / "amx" / "configure.cpp"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="no such processor"
)


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_tile_configuration_is_complete_when_it_is_loaded(
    tmp_path: Path, compiler: str, level: str
) -> None:
    """Without the barriers of our patch GCC drops the stores of the sizes."""
    found = sorted(ROOT.glob("build/*/llama.cpp/ggml"), key=lambda each: each.stat().st_mtime)
    if not found or shutil.which(compiler) is None:
        pytest.skip("no such compiler, or llama.cpp was built elsewhere")
    text = (found[-1] / "src" / "ggml-cpu" / "amx" / "mmq.cpp").read_text()
    patterns = (
        r"^#define GGML_AMX_READS\(ptr\) __asm[^\n]*$",
        r"^struct tile_config_t\{.*?^\};$",
        r"^inline void ggml_tile_config_init.*?^\}$",
    )
    parts = [re.search(each, text, re.MULTILINE | re.DOTALL) for each in patterns]
    (tmp_path / "function.h").write_text("\n".join(part[0] for part in parts if part))
    command = [compiler, "-std=c++17", "-w", level, f"-I{tmp_path}", PROGRAM]
    subprocess.run([*command, "-o", tmp_path / "configure"], check=True)
    result = subprocess.run([tmp_path / "configure"], capture_output=True, text=True, check=True)
    sizes = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert sizes == [(8, 64)] * 2 + [(16, 32)] * 2 + [(16, 64)] * 4
