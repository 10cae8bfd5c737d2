"""Check a checkout on a machine with an NVIDIA GPU, which needs no network, and print one table.

    python scripts/gpu_check.py carry build/gpu-check   # with a network: collects what is needed
    python scripts/gpu_check.py run build/gpu-check     # there: builds, tests, measures

`carry` is for the Python that runs it, or for another one (--python-version 3.12). The machine
needs Python, a C++ compiler, CMake, ninja and CUDA's compiler; CMAKE_ARGS may say where its parts
are. All that is written is in the folder. `run FOLDER --only build` does one step of minutes.

With --mock nothing is built, and a GPU that is none (tests/native/cuda_on_cpu) computes little, to
check this program.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from steps import ROOT, run, say

TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
CLIENT = HELPERS / "rows_on_a_device.py"
DEVICE_TESTS = ("native/test_device.py", "native/test_cuda_kernels.py", "library/test_devices.py")

# What pip installs from the carried wheels, besides llama-cpp-python.
PACKAGES = (
    *("scikit-build-core>=1.1,<2", "pip>=23.1", "setuptools", "cffi>=2,<3", "numpy>=1.24"),
    "llguidance>=1.9,<2",
    *("platformdirs>=4", "prompt-toolkit>=3.0.36,<4", "psutil>=7.2,<8", "rich>=13", "typer>=0.19"),
    *("diskcache", "jinja2", "typing-extensions", "gguf>=0.17", "pytest>=8", "pytest-xdist>=3.6"),
)
PLATFORMS = (
    "manylinux_2_31_x86_64",  # llguidance
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
)

LIMIT = 240  # seconds for a command of a check

# A tiny model, and what the table is about.
PREPARE = """
import sys, pyh2o, tiny_gguf
from pyh2o.library.devices import gpu_names
tiny_gguf.write_tiny_gguf(sys.argv[1], seed=3, n_ctx_train=512, head_size=64)
llama_cpp = pyh2o.build_info()["llama_cpp_commit"]
print(*gpu_names(), f"pyh2o {pyh2o.__version__}, llama.cpp {llama_cpp}", sep=" · ")
sys.exit(None if gpu_names() or sys.argv[2] == "coarse" else "no GPU: `nvidia-smi` must list one")
"""

# What is measured together, since all at once takes more memory than a GPU has: --budget and
# --recall, and the least speeds of the caches, of the full one's, after the longest history.
SPEEDS = (
    ("0.2", "0", {"20 %, no recall": 1.5}),
    ("1.0", "0", {"100 %, no recall": 0.95}),  # what scores cost at equal cells
    ("0.2", "0.025", {"20 %, recall 2.5 %": 0.5}),
)


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    result: str
    must: str
    passed: bool

    @property
    def mark(self) -> str:
        return "" if self.passed else "**failed**"


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
    run_parser.add_argument("--only", nargs="+", choices=["build", *STEPS], help="these steps")
    run_parser.add_argument("-k", default="", help="of the tests these, as pytest takes it")
    run_parser.add_argument("--model", type=Path, help="whose logits are compared, not a tiny one")
    run_parser.add_argument("--shape", default="llama-2-7b", help="see benchmarks/random_model.py")
    run_parser.add_argument("--history", default="4096,8192,32768", help="tokens before measuring")
    run_parser.add_argument(
        "--mock", action="store_const", const="coarse", default="gpu", dest="device", help="above"
    )
    args = parser.parse_args()

    args.folder = args.folder.resolve()
    if args.command == "carry":
        carry(args.folder, args.python_version)
        return 0
    steps = args.only or ["build", *STEPS]
    args.folder.mkdir(parents=True, exist_ok=True)
    python = args.folder / "venv" / "bin" / "python"
    if args.device == "coarse":
        python, args.shape, args.history = Path(sys.executable), "tiny", "64"
    elif "build" in steps:
        build(args.folder, python)
    prepared = finished(
        *(python, "-c", PREPARE, args.folder / "tiny.gguf", args.device), PYTHONPATH=str(HELPERS)
    )
    if not prepared.ok:
        sys.exit(f"error: {prepared.stderr.strip()}")
    checks = [check for step in STEPS if step in steps for check in checks_of(step, python, args)]
    print(f"\n{prepared.last_line}\n")
    print("| check | result | must be | |\n|---|---|---|---|")
    for check in checks:
        print(f"| {check.name} | {check.result} | {check.must} | {check.mark} |")
    return 0 if all(check.passed for check in checks) else 1


def checks_of(step: str, python: Path, args: argparse.Namespace) -> Iterator[Check]:
    """The lines of a step, told as they come; what breaks it is the last one."""
    try:
        for check in STEPS[step](python, args):
            say(f"{check.name}: {check.result} {check.mark}")
            yield check
    except Exception as error:
        yield Check(step, f"{type(error).__name__}: {error}", "", False)


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


def build(folder: Path, python: Path) -> None:
    """An environment with this checkout, compiled for the GPU at hand."""
    shutil.unpack_archive(folder / "llama.cpp.tar.xz", folder / "llama.cpp")
    if not python.exists():
        call(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    arguments = (
        *("-DLLAMA_BUILD=OFF", "-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"),
        *(f"-DPYH2O_LLAMA_CPP={folder / 'llama.cpp'}", os.environ.get("CMAKE_ARGS", "")),
    )
    call(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-index", "--find-links", folder / "wheels", ".", "gguf", "pytest", "pytest-xdist"),
        CMAKE_ARGS=" ".join(arguments),
        CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count() or 1),
    )


# -------------------------------------------------------------------------------------------------
# Right answers
# -------------------------------------------------------------------------------------------------


def check_tests(python: Path, args: argparse.Namespace) -> Iterator[Check]:
    """The tests of what runs on a device, with a line for each of those that run there."""
    report = args.folder / "tests.xml"
    report.unlink(missing_ok=True)
    done = finished(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
        *("-n", "4" if args.device == "gpu" else "0", "-k", args.k),
        *(TESTS / name for name in DEVICE_TESTS),
        PYH2O_TEST_DEVICE=args.device,
    )
    passed: dict[str, list[bool]] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        endings = {child.tag for child in case}
        if case.attrib["classname"].endswith("test_device") and "skipped" not in endings:
            name = case.attrib["name"].removeprefix("test_").partition("[")[0].replace("_", " ")
            passed.setdefault(name, []).append(not endings & {"failure", "error"})
    for name, all_of_it in passed.items():
        n_passed = f"{sum(all_of_it)} of {len(all_of_it)}"
        yield Check(name, n_passed, "all", all(all_of_it))
    yield Check("all tests of devices", done.last_line, "pass", done.ok)


def check_text(python: Path, args: argparse.Namespace) -> Iterator[Check]:
    """Logits along a greedy text of the CPU."""
    model = args.model.resolve() if args.model else args.folder / "tiny.gguf"
    done = finished(python, CLIENT, args.device, model, "text", "200")
    yield Check(f"greedy text of {model.name}", done.last_line, "the CPU's, to rounding", done.ok)


def check_memory(python: Path, args: argparse.Namespace) -> Iterator[Check]:
    """CUDA's own checker over compactions and re-bases of a tiny model."""
    for tool in ("memcheck", "racecheck"):
        done = finished(
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            *("--report-api-errors", "no"),  # ggml tries to update graphs that cannot be
            *("--target-processes", "all", python, CLIENT, args.device),
            *(args.folder / "tiny.gguf", "state", "f16", "0"),
        )
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        result = summary[-1].strip("= ") if summary else done.last_line
        yield Check(f"compute-sanitizer {tool}", result, "no error", done.ok)


# -------------------------------------------------------------------------------------------------
# Speed and memory
# -------------------------------------------------------------------------------------------------


def check_speed(python: Path, args: argparse.Namespace) -> Iterator[Check]:
    """A model of random weights, by turns with llama.cpp's full cache and flash attention."""
    model, report = args.folder / f"{args.shape}.gguf", args.folder / "speed.json"
    research = {"PYTHONPATH": str(ROOT)}
    if not model.exists():
        # or a budget of all rows would be less the slack
        made = ("research.benchmarks.random_model", args.shape, model, "--context", "65536")
        finished(python, "-m", *made, **research)
    layers, n = ("0", "4") if args.device == "coarse" else ("-1", "64")
    histories = sorted(int(tokens) for tokens in args.history.split(","))
    longest = histories[-1]
    for budget, recall, caches in SPEEDS:
        report.unlink(missing_ok=True)
        done = finished(
            *(python, "-m", "research.speed", "--model", model, "--only-flash", "--kv-type", "f16"),
            *("--gpu-layers", layers, "--ctx", str(longest)),
            *("--history", ",".join(map(str, histories))),
            *("--budget", budget, "--recall", recall, "-n", n, "--json", report),
            **research,
        )
        print(done.stdout)
        for result in json.loads(report.read_text())["histories"] if report.exists() else ():
            is_longest = result["history"] == longest
            for check in speed_checks(result, caches, is_longest=is_longest):
                # a tiny model says nothing of speed
                is_judged = args.device == "gpu" or check.must == "measured"
                yield check if is_judged else replace(check, passed=True)
        if not done.ok:
            yield Check(f"speed of --budget {budget}", done.last_line, "measured", False)


def speed_checks(
    result: dict[str, Any], caches: dict[str, float], *, is_longest: bool
) -> Iterator[Check]:
    """The lines for one history of a comparison."""
    found = {figures["cache"]: figures for figures in result["figures"] if figures["ratio"]}
    for cache, least in caches.items():
        name = f"{cache}, after {result['history']:,} tokens"
        if cache not in found:
            yield Check(name, "see above", "measured", False)
            continue
        figures = found[cache]
        ratio, per_second = (figures[key]["median"] for key in ("ratio", "generated_per_second"))
        low = least if is_longest else min(least, 1.0)
        speed = f"{ratio:.2f}x full, {per_second:.0f} tok/s"
        yield Check(f"{name}: speed", speed, f">= {low}x", ratio >= low)
        if cache == "20 %, no recall":
            share, memory = figures["compaction_share"], figures["share_of_full"]
            yield Check(f"{name}: compactions", f"{share:.1%} of time", "<= 1%", share <= 0.01)
            # the rows, a slack of 512 and scores
            yield Check(f"{name}: KV memory", f"{memory:.1%} of full", "<= 22.5%", memory <= 0.225)


STEPS = {"tests": check_tests, "text": check_text, "memory": check_memory, "speed": check_speed}


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
        first, second = (self.stdout, self.stderr) if self.ok else (self.stderr, self.stdout)
        return (first.strip() or second.strip() or "nothing was printed").splitlines()[-1]


def finished(*command: str | Path, **environment: str) -> Finished:
    """What a command says, in a folder where `pyh2o` is the installed one, within some minutes."""
    with subprocess.Popen(
        [str(part) for part in command],
        cwd=TESTS,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=LIMIT)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            stdout, stderr = process.communicate()
            stderr += f"\nended after {LIMIT} s"
    if process.returncode:
        print(stdout[-20_000:], stderr[-3000:], sep="\n", file=sys.stderr)
    return Finished(process.returncode == 0, stdout, stderr)


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
