"""Steps of the long checks: print what is done, run programs, build."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LLAMA_CPP = ROOT / "build" / "llama.cpp"


def run(
    command: Sequence[str | Path], variables: Mapping[str, str] | None = None, capture: bool = False
) -> str:
    """Run a program in the checkout, with more environment variables; return captured output."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        check=True,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    return result.stdout or ""


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def prepare_llama_cpp() -> None:
    """Write the patched sources of llama.cpp to `LLAMA_CPP`."""
    run([sys.executable, "-B", "native/prepare_llama_cpp.py", "--output", LLAMA_CPP])


def build_beside(folder: Path, define: str, variables: Mapping[str, str]) -> Path:
    """Build incrementally in a separate folder, and return the folder for PYTHONPATH.

    Args:
        define: NAME=VALUE for CMake.
        variables: added to the environment.
    """
    package = folder / "package"
    options = [
        f"build-dir={folder / 'cmake'}",
        "install.strip=false",
        f"cmake.define.{define}",
        f"cmake.define.PYH2O_LLAMA_CPP={LLAMA_CPP}",
    ]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--no-deps", "--upgrade", "--target", str(package), "."]
    pip += [text for option in options for text in ("-C", option)]
    prepare_llama_cpp()
    run(pip, {**variables, "CCACHE_NOHASHDIR": "1"})
    return package
