"""Run the tests of native code under a sanitizer: address (with undefined behaviour) or thread.

Any report of the sanitizer is a failure. Reports go to files, as pytest shows no output of passing
tests. The build is separate from the normal one.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from steps import ROOT, build_beside, run, say

SUPPRESSIONS = ROOT / "tests" / "sanitizers"
# Not a report: CUDA's threads are coroutines in tests/native/cuda_on_cpu.
COROUTINES = (
    "ASan is ignoring requested __asan_handle_no_return",
    "False positive error reports may follow",
    "For details see",
)


# Compiler flags for C++ that tests compile.
FLAGS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
# Environment variables, without the path of the log.
OPTIONS = {
    # Python frees little of its own memory when it ends
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": f"print_stacktrace=1:suppressions={SUPPRESSIONS / 'undefined.txt'}",
    },
    "thread": {"TSAN_OPTIONS": "second_deadlock_stack=1"},
}
TESTS = {
    "address": ("tests/native", "tests/properties/test_llama_sequences.py"),
    "thread": (
        "tests/engine",
        "tests/native/test_kernels.py",
        "tests/native/test_q4_1_products.py",
        "tests/native/test_aborting.py",
        "tests/native/test_native_recall.py",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=FLAGS)
    parser.add_argument("tests", nargs="*", help="instead of the default tests")
    args = parser.parse_args()
    name = args.sanitizer
    folder = ROOT / "build" / "sanitize" / name
    package = build(name, folder)
    logs = folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    options = {
        variable: f"{text}:log_path={logs / variable.split('_')[0].lower()}"
        for variable, text in OPTIONS[name].items()
    }
    environment = {
        **os.environ,
        **options,
        "PYTHONPATH": str(package),
        "LD_PRELOAD": runtime(name),
        "CXX": compilers(name)["CXX"],
        "CXXFLAGS": FLAGS[name],
        # the sanitizer does not support NumPy's threads
        "OPENBLAS_NUM_THREADS": "1",
    }
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider"]
    say(f"tests under the {name} sanitizer")
    tests = args.tests or TESTS[name]
    status = subprocess.run([*pytest, *tests], cwd=ROOT, env=environment, check=False).returncode
    for file in sorted(logs.iterdir()):
        lines = file.read_text(errors="replace").splitlines()
        said = "\n".join(line for line in lines if not any(text in line for text in COROUTINES))
        if said.strip():
            print(f"{file}:\n{said[:4000]}")
            status = status or 1
    return status


CLANG = {"CC": "clang", "CXX": "clang++"}
# A Python that loads clang's thread sanitizer does not start.
GCC = {"CC": "gcc", "CXX": "g++"}


def compilers(sanitizer: str) -> dict[str, str]:
    """Return CC and CXX from the environment, or defaults; exit if they are missing."""
    defaults = GCC if sanitizer == "thread" else CLANG
    chosen = {name: os.environ.get(name, default) for name, default in defaults.items()}
    for command in chosen.values():
        if shutil.which(command) is None:
            sys.exit(f"there is no {command}: apt install {command}, or set CC and CXX")
    return chosen


def build(sanitizer: str, folder: Path) -> Path:
    """Build with "address", "thread" or "fuzzer" (native/sanitizers.cmake); see `build_beside`."""
    return build_beside(folder, f"PYH2O_SANITIZE={sanitizer}", compilers(sanitizer))


RUNTIMES = {"address": "asan", "thread": "tsan"}


def runtime(sanitizer: str) -> str:
    """Return the library of a sanitizer, for LD_PRELOAD."""
    compiler, name = compilers(sanitizer)["CC"], RUNTIMES[sanitizer]
    file = f"lib{name}.so"
    if "clang" in compiler:
        file = f"libclang_rt.{name}-{platform.machine()}.so"
    command = [*compiler.split(), f"-print-file-name={file}"]
    found = run(command, capture=True).strip()
    if not Path(found).is_absolute():
        sys.exit(f"{compiler} has no {file}: install its sanitizers, or set CC and CXX")
    return found


if __name__ == "__main__":
    sys.exit(main())
