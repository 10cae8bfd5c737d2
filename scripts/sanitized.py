"""Builds pyh2o with sanitizers, beside the normal build."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LLAMA_CPP = ROOT / "build" / "llama.cpp"

CLANG = {"CC": "clang", "CXX": "clang++"}
# A Python that loads clang's thread sanitizer does not start.
GCC = {"CC": "gcc", "CXX": "g++"}


def compilers(sanitizer: str) -> dict[str, str]:
    """CC and CXX, of the environment or those that fit. Exits if they are not there."""
    defaults = GCC if sanitizer == "thread" else CLANG
    chosen = {name: os.environ.get(name, default) for name, default in defaults.items()}
    for command in chosen.values():
        if shutil.which(command) is None:
            sys.exit(f"there is no {command}: apt install {command}, or set CC and CXX")
    return chosen


def prepare_llama_cpp() -> None:
    """Have the patched sources of llama.cpp in `LLAMA_CPP`."""
    command = [sys.executable, "-B", "native/prepare_llama_cpp.py", "--output", str(LLAMA_CPP)]
    subprocess.run(command, cwd=ROOT, check=True)


def build(sanitizer: str, folder: Path) -> Path:
    """Build what changed since the last time, in minutes the first time.

    Args:
        sanitizer: "address", "thread" or "fuzzer" (see native/sanitizers.cmake).
        folder: for the build.

    Returns:
        A folder for PYTHONPATH, with the package and its libraries.
    """
    package = folder / "package"
    options = [
        f"build-dir={folder / 'cmake'}",
        "install.strip=false",
        f"cmake.define.PYH2O_SANITIZE={sanitizer}",
        f"cmake.define.PYH2O_LLAMA_CPP={LLAMA_CPP}",
    ]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--no-deps", "--upgrade", "--target", str(package), "."]
    pip += [text for option in options for text in ("-C", option)]
    environment = {**os.environ, **compilers(sanitizer), "CCACHE_NOHASHDIR": "1"}
    prepare_llama_cpp()
    subprocess.run(pip, cwd=ROOT, env=environment, check=True)
    return package


RUNTIMES = {"address": "asan", "thread": "tsan"}


def runtime(sanitizer: str) -> str:
    """The library of a sanitizer, for LD_PRELOAD."""
    compiler, name = compilers(sanitizer)["CC"], RUNTIMES[sanitizer]
    file = f"lib{name}.so"
    if "clang" in compiler:
        file = f"libclang_rt.{name}-{platform.machine()}.so"
    command = [*compiler.split(), f"-print-file-name={file}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"{compiler} has no {file}: install its sanitizers, or set CC and CXX")
    return found
