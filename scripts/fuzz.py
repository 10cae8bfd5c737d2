"""Fuzz the native parsers: states of caches, archives in memory and archives in files.

Each target changes the inputs of tests/fuzz/corpus, and those that it found to be new in an earlier
run, which stay under build/fuzz. What ends a target is kept there, and the command that repeats
it is told.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from sanitized import ROOT, build, compilers

TARGETS = ("states", "archive_states", "archive_files")

FOLDER = ROOT / "build" / "fuzz"
SEEDS = ROOT / "tests" / "fuzz" / "corpus"
MODEL = FOLDER / "model.gguf"

# In seconds and MiB, of one input: a target needs milliseconds and 600 MiB, most of it noted by
# the sanitizer of what was freed.
LIMITS = ("-timeout=20", "-rss_limit_mb=2048", "-malloc_limit_mb=512")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seeds", action="store_true", help="write tests/fuzz/corpus anew")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all, unless named")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"there is no target {unknown.pop()}; there are {', '.join(TARGETS)}")
    programs = build_targets()
    os.environ["PYH2O_FUZZ_MODEL"] = str(MODEL)
    if args.seeds:
        return subprocess.run([programs / "seeds", SEEDS], check=False).returncode
    failed = [
        target for target in args.targets or TARGETS if not fuzz(programs, target, args.seconds)
    ]
    return 1 if failed else 0


def build_targets() -> Path:
    """Returns the folder of the programs."""
    package = build("fuzzer", FOLDER)
    programs = FOLDER / "targets"
    environment = {**os.environ, **compilers("fuzzer")}
    settings = {"LIBRARIES": package / "pyh2o" / "lib", "LLAMA_CPP": ROOT / "build" / "llama.cpp"}
    configure: list[str | Path] = ["cmake", "-G", "Ninja", "-B", programs]
    configure += ["-S", ROOT / "tests" / "fuzz", "--log-level=WARNING"]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    subprocess.run(configure, env=environment, check=True)
    subprocess.run(["cmake", "--build", programs, "--", "--quiet"], check=True)
    helpers = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "helpers")}
    model: list[str | Path] = [sys.executable, "-P", ROOT / "tests" / "fuzz" / "model.py", MODEL]
    subprocess.run(model, env=helpers, check=True)
    return programs


def fuzz(programs: Path, target: str, seconds: int) -> bool:
    """Returns whether nothing was found."""
    corpus, found = FOLDER / "corpus" / target, FOLDER / "found" / target
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    print(f"==> {target}, {seconds} s", flush=True)
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
        print(f"repeat it with:\n    PYH2O_FUZZ_MODEL={MODEL} {programs / target} {file}")
    print(f"all that it said: {log}")
    return False


if __name__ == "__main__":
    sys.exit(main())
