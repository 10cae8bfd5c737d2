"""Fuzz the native code: states of caches, and archives in memory and in files.

Each target mutates the inputs of tests/fuzz/corpus and those that earlier runs have added under
build/fuzz. Inputs that crash a target are kept there; the command that repeats a crash is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from sanitize import build, compilers
from steps import LLAMA_CPP, ROOT, prepare_llama_cpp, run, say

TARGETS = ("states", "archive_states", "archive_files")

FOLDER = ROOT / "build" / "fuzz"
SEEDS = ROOT / "tests" / "fuzz" / "corpus"
MODELS = FOLDER / "models"

# In seconds and MiB, per input: a target needs milliseconds and 600 MiB, mostly the sanitizer's.
LIMITS = ("-timeout=20", "-rss_limit_mb=2048", "-malloc_limit_mb=512")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument(
        "--unsanitized",
        action="store_true",
        help="use the installed library: ten times as fast, but finds little",
    )
    parser.add_argument("--seeds", action="store_true", help="rewrite tests/fuzz/corpus")
    parser.add_argument("targets", nargs="*", help=f"{', '.join(TARGETS)}; default: all")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"unknown target {unknown.pop()}: give one of {', '.join(TARGETS)}")
    programs = build_targets(args.unsanitized)
    os.environ["PYH2O_FUZZ_MODELS"] = str(MODELS)
    if args.seeds:
        return subprocess.run([programs / "seeds", SEEDS], check=False).returncode
    failed = [
        target for target in args.targets or TARGETS if not fuzz(programs, target, args.seconds)
    ]
    return 1 if failed else 0


def build_targets(unsanitized: bool) -> Path:
    if unsanitized:
        from pyh2o.library import LIBRARY_FOLDER

        libraries = LIBRARY_FOLDER
        prepare_llama_cpp()
    else:
        libraries = build("fuzzer", FOLDER) / "pyh2o" / "lib"
    programs = FOLDER / ("unsanitized" if unsanitized else "targets")
    settings: dict[str, str | Path] = {"LIBRARIES": libraries, "LLAMA_CPP": LLAMA_CPP}
    settings["SANITIZED"] = "OFF" if unsanitized else "ON"
    configure: list[str | Path] = ["cmake", "-G", "Ninja", "-B", programs]
    configure += ["-S", ROOT / "tests" / "fuzz", "--log-level=WARNING"]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    run(configure, compilers("fuzzer"))
    run(["cmake", "--build", programs, "--", "--quiet"])
    MODELS.mkdir(exist_ok=True)
    models: list[str | Path] = [sys.executable, "-P", ROOT / "tests" / "fuzz" / "models.py", MODELS]
    run(models, {"PYTHONPATH": str(ROOT / "tests" / "helpers")})
    return programs


def fuzz(programs: Path, target: str, seconds: int) -> bool:
    """Run a target, and return whether it found nothing."""
    corpus, found = FOLDER / "corpus" / target, FOLDER / "found" / target
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    say(f"{target}, {seconds} s")
    command: list[str | Path] = [programs / target, f"-max_total_time={seconds}", *LIMITS]
    command += [f"-artifact_prefix={found}/", "-print_final_stats=1", corpus, SEEDS / target]
    log = FOLDER / f"{target}.log"
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    lines = log.read_text(errors="replace").splitlines()
    if status == 0:
        print("\n".join(line for line in lines if "DONE" in line or line.startswith("stat::")))
        return True
    print("\n".join([line for line in lines if "NEW" not in line and "REDUCE" not in line][-40:]))
    for file in sorted(set(found.iterdir()) - before):
        print(f"to repeat it:\n    PYH2O_FUZZ_MODELS={MODELS} {programs / target} {file}")
    print(f"log: {log}")
    return False


if __name__ == "__main__":
    sys.exit(main())
