"""Run the tests of native code under a sanitizer: address (with undefined behaviour) or thread.

The first thing that a sanitizer says makes this fail. It goes to files, as pytest shows no output
of tests that pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sanitized import ROOT, build, compilers, runtime

SUPPRESSIONS = ROOT / "tests" / "sanitizers"
# A warning and no report: CUDA's threads are coroutines in tests/native/cuda_on_cpu.
COROUTINES = "ASan doesn't fully support makecontext/swapcontext"


@dataclass(frozen=True)
class Sanitizer:
    """What the tests compile with, what the sanitizer is told, and which tests there are to run.

    Attributes:
        flags: for the C++ that tests compile themselves.
        options: environment variables, without the place of the log.
        tests: paths, and what else pytest is to be told.
    """

    flags: str
    options: dict[str, str]
    tests: tuple[str, ...]


SANITIZERS = {
    "address": Sanitizer(
        flags="-fsanitize=address,undefined",
        # Python frees little of its own memory when it ends
        options={
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": f"print_stacktrace=1:suppressions={SUPPRESSIONS / 'undefined.txt'}",
        },
        tests=("tests/native",),
    ),
    "thread": Sanitizer(
        flags="-fsanitize=thread",
        options={"TSAN_OPTIONS": "second_deadlock_stack=1"},
        tests=(
            "tests/engine",
            "tests/native/test_kernels.py",
            "tests/native/test_q4_1_products.py",
            "tests/native/test_breaking_off.py",
            "tests/native/test_native_recall.py",
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("tests", nargs="*", help="in place of all that are meant for it")
    args = parser.parse_args()
    sanitizer = SANITIZERS[args.sanitizer]
    folder = ROOT / "build" / "sanitize" / args.sanitizer
    package = build(args.sanitizer, folder)
    logs = folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    environment = surroundings(args.sanitizer, package, logs)
    tests = args.tests or sanitizer.tests
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider"]
    print(f"==> tests under the {args.sanitizer} sanitizer", flush=True)
    status = subprocess.run([*pytest, *tests], cwd=ROOT, env=environment, check=False).returncode
    return status or tell(logs)


def surroundings(name: str, package: Path, logs: Path) -> dict[str, str]:
    """The environment of the tests."""
    sanitizer = SANITIZERS[name]
    options = {
        variable: f"{text}:log_path={logs / variable.split('_')[0].lower()}"
        for variable, text in sanitizer.options.items()
    }
    return {
        **os.environ,
        **options,
        "PYTHONPATH": str(package),
        "LD_PRELOAD": runtime(name),
        "CXX": compilers(name)["CXX"],
        "CXXFLAGS": sanitizer.flags,
        # NumPy's threads are nothing that the sanitizer can see into
        "OPENBLAS_NUM_THREADS": "1",
    }


def tell(logs: Path) -> int:
    """Returns 1 if a sanitizer has said anything."""
    found = False
    for file in sorted(logs.iterdir()):
        lines = file.read_text(errors="replace").splitlines()
        said = "\n".join(line for line in lines if COROUTINES not in line)
        if said.strip():
            print(f"{file}:\n{said[:4000]}")
            found = True
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
