"""Check a checkout on a machine with an NVIDIA GPU, which needs no network, and print one table.

    python scripts/gpu_check.py carry build/gpu-check   # with a network: collects what is needed
    python scripts/gpu_check.py run build/gpu-check     # there: builds, tests, measures

`carry` is for the Python that runs it, or for another one (--python-version 3.12). The machine
needs Python, a C++ compiler, CMake, ninja and CUDA's compiler. All it writes is in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from steps import ROOT, run, say

TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
DEVICE_TESTS = ("native/test_device.py", "native/test_cuda_kernels.py", "library/test_devices.py")

# What pip installs from the carried wheels, besides llama-cpp-python.
PACKAGES = (
    *("scikit-build-core>=1.1,<2", "pip>=23.1", "setuptools", "cffi>=2,<3", "numpy>=1.24"),
    *("platformdirs>=4", "prompt-toolkit>=3.0.36,<4", "psutil>=7.2,<8", "rich>=13", "typer>=0.19"),
    *("diskcache", "jinja2", "typing-extensions", "gguf>=0.17", "pytest>=8"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64")

WRITE_TINY = "import sys, tiny_gguf as t; t.write_tiny_gguf(sys.argv[1], seed=3, n_ctx_train=64)"
GPUS = "import json; from pyh2o.library.devices import gpu_names; print(json.dumps(gpu_names()))"
VERSION = """
import pyh2o
print(f"pyh2o {pyh2o.__version__}, llama.cpp {pyh2o.build_info()['llama_cpp_commit']}")
"""

# cuBLAS would round what it multiplies to ten bits: right for speed, wrong for a comparison.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}

POLICIES = (
    *("h2o", "h2o-mean", "h2o-decay:half_life=20", "h2o-far:near=4,half_life=20"),
    *("roco", "snap:queries=1,pool=1", "snap:queries=5,pool=3", "streaming"),
    *(
        f"{ROOT}/research/policies/{name}"
        for name in ("keydiff.py:KeyDiff", "expected.py:Expected")
    ),
)


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    result: str
    must: str
    passed: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    carry_parser = commands.add_parser("carry", help="collect what the other machine needs")
    carry_parser.add_argument("folder", type=Path)
    carry_parser.add_argument("--python-version", help="of the other machine")
    run_parser = commands.add_parser("run", help="build, test and measure")
    run_parser.add_argument("folder", type=Path)
    run_parser.add_argument("--model", type=Path, help="the demo model, to compare texts with")
    run_parser.add_argument("--shape", default="llama-2-7b", help="see benchmarks/random_model.py")
    run_parser.add_argument("--history", default="4096,32768", help="tokens before measuring")
    args = parser.parse_args()

    folder = args.folder.resolve()
    if args.command == "carry":
        carry(folder, args.python_version)
        return 0
    python = build(folder)
    gpus = json.loads(finished(python, "-c", GPUS).last_line)
    if not gpus:
        sys.exit("error: there is no GPU to check: `nvidia-smi` must list one")
    tiny = folder / "tiny.gguf"
    call(python, "-c", WRITE_TINY, tiny, PYTHONPATH=str(HELPERS))
    checks: list[Check] = []
    for check in chain(
        check_tests(python),
        check_policies(python, tiny),
        check_memory(python, tiny),
        check_text(python, args.model),
        check_speed(python, folder, args.shape, args.history),
    ):
        checks.append(check)
        say(f"{check.name}: {check.result}")
    print(f"\n{', '.join(gpus)} · {finished(python, '-c', VERSION).last_line}\n")
    print("| check | result | must be | |\n|---|---|---|---|")
    for check in checks:
        mark = "" if check.passed else "**failed**"
        print(f"| {check.name} | {check.result} | {check.must} | {mark} |")
    return 0 if all(check.passed for check in checks) else 1


# -------------------------------------------------------------------------------------------------
# Carrying and building
# -------------------------------------------------------------------------------------------------


def carry(folder: Path, python_version: str | None) -> None:
    """Fill the folder with the patched llama.cpp and with wheels."""
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    sources = folder / "llama.cpp"
    call(sys.executable, "native/prepare_llama_cpp.py", "--output", sources)
    shutil.make_archive(str(sources), "xztar", sources)
    shutil.rmtree(sources)
    call(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, "--requirement", "requirements.txt")
    other = [] if python_version is None else ["--python-version", python_version]
    for platform in PLATFORMS if other else ():
        other += ["--platform", platform]
    binary = ["--only-binary=:all:", *other]
    call(*pip, "download", "--quiet", "--dest", wheels, *binary, *PACKAGES)


def build(folder: Path) -> Path:
    """An environment with this checkout, compiled for the GPU at hand; returns its Python."""
    shutil.unpack_archive(folder / "llama.cpp.tar.xz", folder / "llama.cpp")
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        call(sys.executable, "-m", "venv", folder / "venv")
    arguments = (
        *("-DLLAMA_BUILD=OFF", "-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"),
        f"-DPYH2O_LLAMA_CPP={folder / 'llama.cpp'}",
    )
    call(
        *(python, "-m", "pip", "install", "--quiet"),
        *("--no-index", "--find-links", folder / "wheels", ".", "gguf", "pytest"),
        CMAKE_ARGS=" ".join(arguments),
        CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count() or 1),
    )
    return python


# -------------------------------------------------------------------------------------------------
# Right answers
# -------------------------------------------------------------------------------------------------


def check_tests(python: Path) -> Iterator[Check]:
    """The tests of what runs on a device."""
    done = finished(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *(TESTS / name for name in DEVICE_TESTS),
        **EXACT,
    )
    yield Check("tests of a device", done.last_line, "pass", done.ok)


def check_policies(python: Path, tiny: Path) -> Iterator[Check]:
    """Every policy's kept rows after every compaction against the NumPy reference on the CPU."""
    for chunk, attention, what in (("1", "flash", "our kernels"), ("7", "composed", "ggml's ops")):
        wrong = []
        for policy in POLICIES:
            client = (python, HELPERS / "rows_on_a_device.py", "gpu", tiny, "reference")
            done = finished(*client, attention, policy, chunk, **EXACT)
            if not done.ok:
                wrong.append(policy)
                print(done.stderr[-1500:], file=sys.stderr)
        result = f"{len(POLICIES) - len(wrong)} of {len(POLICIES)} policies"
        result += f"; not: {', '.join(wrong)}" if wrong else ""
        yield Check(f"kept rows equal the CPU's, {what}", result, "all", not wrong)


def check_memory(python: Path, tiny: Path) -> Iterator[Check]:
    """CUDA's own checker over compactions and re-bases of a tiny model."""
    checker = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        name = f"compute-sanitizer {tool}"
        if checker is None:
            yield Check(name, "not installed", "no error", False)
            continue
        done = finished(
            *(checker, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"),
            *(python, HELPERS / "rows_on_a_device.py", "gpu", tiny),
            *("reference", "flash", "h2o-far:near=4", "1"),
            **EXACT,
        )
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        yield Check(name, (summary or ["no summary"])[-1].strip("= "), "no error", done.ok)


def check_text(python: Path, model: Path | None) -> Iterator[Check]:
    """200 tokens of greedy text, on the GPU and on the CPU."""
    name = "greedy text equals the CPU's for 200 tokens"
    if model is None:
        yield Check(name, "left out: no --model", "equal, or a near tie", True)
        return
    done = finished(python, ROOT / "scripts" / "gpu_logits.py", model)
    yield Check(name, done.last_line, "equal, or a near tie", done.ok)


# -------------------------------------------------------------------------------------------------
# Speed and memory
# -------------------------------------------------------------------------------------------------


def check_speed(python: Path, folder: Path, shape: str, history: str) -> Iterator[Check]:
    """A model of random weights, by turns with llama.cpp's full cache and flash attention."""
    model, report = folder / f"{shape}.gguf", folder / "bench.json"
    if not model.exists():
        call(python, "-m", "research.benchmarks.random_model", shape, model)
    report.unlink(missing_ok=True)
    longest = max(int(tokens) for tokens in history.split(","))
    call(
        *(python, "-m", "research.speed", "--model", model, "--gpu-layers", "-1"),
        *("--ctx", str(longest), "--history", history, "--budget", "0.2,1.0", "--kv-type", "f16"),
        *("-n", "64", "--rounds", "5", "--recall", "0", "--json", report),
    )
    for result in json.loads(report.read_text())["histories"]:
        yield from speed_checks(result, is_longest=result["history"] == longest)


def speed_checks(result: dict[str, Any], *, is_longest: bool) -> Iterator[Check]:
    """The lines for one history of the comparison."""
    after = f"after {result['history']:,} tokens"
    found = {figures["cache"]: figures for figures in result["figures"]}
    ours = next((f for name, f in found.items() if name.startswith("20 %")), None)
    equal = next((f for name, f in found.items() if name.startswith("100 %")), None)
    if ours is not None:
        low = 1.5 if is_longest else 1.0
        ratio = ours["ratio"]["median"]
        yield Check(f"20 %, {after}: speed", f"{ratio:.2f}x full", f">= {low}x", ratio >= low)
        share = ours["compaction_share"]
        yield Check(
            f"20 %, {after}: compactions", f"{share:.1%} of the time", "<= 1%", share <= 0.01
        )
        if is_longest:
            memory = ours["share_of_full"]
            yield Check("20 %: KV memory", f"{memory:.1%} of full", "<= 22%", memory <= 0.22)
    if equal is not None:
        cost = 1 - equal["ratio"]["median"]
        yield Check(f"scores at equal cells, {after}", f"cost {cost:.1%}", "<= 5%", cost <= 0.05)


# -------------------------------------------------------------------------------------------------
# Programs
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    ok: bool
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """Of what the command printed, or else of its errors."""
        lines = (self.stdout.strip() or self.stderr.strip() or "nothing was printed").splitlines()
        return lines[-1]


def finished(*command: str | Path, **environment: str) -> Finished:
    """What a command says, in a folder where `pyh2o` is the installed one."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=TESTS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return Finished(done.returncode == 0, done.stdout, done.stderr)


def call(*command: str | Path, **environment: str) -> None:
    """Run a command that has to succeed, and say how long it took."""
    words = [str(part) for part in command]
    say(" ".join(words)[:150])
    started = time.perf_counter()
    try:
        run(words, environment)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {words[0]} ended with {error.returncode}: see its output above")
    print(f"    {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
