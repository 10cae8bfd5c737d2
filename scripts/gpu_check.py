"""Check a checkout on a machine with an NVIDIA GPU and no network, within 12 minutes.

    python scripts/gpu_check.py carry build/gpu-check   # with a network: collects the files
    python scripts/gpu_check.py run build/gpu-check     # with the GPU: builds, tests, measures

`carry` is for the Python that runs it, or for --python-version 3.12. The machine with the GPU needs
Python, a C++ compiler, CMake, ninja and CUDA's compiler; CMAKE_ARGS may have their paths. A wheel
of pyh2o in FOLDER/wheels is installed instead of building one. Each step has a time limit, plus the
seconds that earlier steps saved. If a step fails or times out, the others still run. Results are in
report.md in the folder. `run FOLDER --only build tests` runs these steps.

With --mock nothing is built, and an emulated GPU (tests/native/cuda_on_cpu) runs tiny cases, to
rehearse all steps in a minute.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from gpu_figures import check_kernels, check_profile, check_speed, compile_kernels, write_model
from gpu_plan import HELPERS, TESTS, Check, Finished, Plan, call, cuda_file
from steps import ROOT, say

CLIENT = HELPERS / "rows_on_a_device.py"
DEVICE_TESTS = ("native/test_device.py", "native/test_cuda_kernels.py", "library/test_devices.py")

# Packages to install from the carried wheels, in addition to llama-cpp-python.
PACKAGES = (
    *("scikit-build-core>=1.1,<2", "pip>=23.1", "setuptools", "cffi>=2,<3", "numpy>=1.24"),
    *("llguidance>=1.9,<2", "patch-ng>=1.18,<2"),
    *("platformdirs>=4", "portalocker>=4,<5", "prompt-toolkit>=3.0.36,<4", "psutil>=7.2,<8"),
    *("rich>=13", "typer>=0.19"),
    *("diskcache", "jinja2", "typing-extensions", "gguf>=0.17", "pytest>=8", "pytest-xdist>=3.6"),
)
PLATFORMS = (
    "manylinux_2_31_x86_64",  # llguidance
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
)

# Writes a tiny model, and prints the GPU and the versions.
PREPARE = """
import sys, pytest, pyh2o, tiny_gguf
from pyh2o.library.devices import gpu_names
tiny_gguf.write_tiny_gguf(sys.argv[1], seed=3, n_ctx_train=256, head_size=64)
llama_cpp = pyh2o.build_info()["llama_cpp_commit"]
print(*gpu_names(), f"pyh2o {pyh2o.__version__}, llama.cpp {llama_cpp}", sep=" · ")
sys.exit(None if gpu_names() or sys.argv[2] == "coarse" else "no GPU: `nvidia-smi` must list one")
"""


Checks = Callable[[Plan], Iterator[Check]]


class Step(NamedTuple):
    checks: Checks
    seconds: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    carry_parser = commands.add_parser(
        "carry", help="collect the files for the machine with the GPU"
    )
    carry_parser.add_argument("folder", type=Path)
    carry_parser.add_argument("--python-version", help="Python version of that machine")
    run_parser = commands.add_parser("run", help="build, test, measure and profile")
    run_parser.add_argument("folder", type=Path)
    run_parser.add_argument(
        "--only", nargs="+", choices=STEPS, default=[*STEPS], help="run only these steps"
    )
    run_parser.add_argument("-k", default="", help="run only these tests (as pytest -k)")
    run_parser.add_argument("--model", type=Path, help="model for comparing logits")
    run_parser.add_argument("--shape", default="llama-3-8b", help="see benchmarks/random_model.py")
    run_parser.add_argument(
        "--mock", action="store_const", const="coarse", default="gpu", dest="device", help="above"
    )
    args = parser.parse_args()

    folder = args.folder.resolve()
    if args.command == "carry":
        carry(folder, args.python_version)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(folder, args.device, args.only, args.k, args.model, args.shape)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    try:
        due = time.monotonic()
        for name, step in STEPS.items():
            if name in ("gpu", *plan.only):
                due += step.seconds
                take(plan, name, step.checks, due)
    finally:
        print(f"\n{plan.write()}", flush=True)
    return 0 if all(check.passed for check in plan.checks) else 1


def take(plan: Plan, name: str, checks: Checks, due: float) -> None:
    """Run a step until `due` (by time.monotonic()), print its lines and add them to the plan."""
    started, plan.ends = time.monotonic(), due
    say(f"{name}: {due - started:.0f} s at most")
    try:
        for check in checks(plan):
            print(f"    {check.line}", flush=True)
            plan.checks.append(check)
    except Exception as error:
        plan.checks.append(Check(name, f"{type(error).__name__}: {error}", "", False))
    print(f"    {time.monotonic() - started:.0f} s", flush=True)
    plan.write()


# -------------------------------------------------------------------------------------------------
# Carrying and building
# -------------------------------------------------------------------------------------------------


def carry(folder: Path, python_version: str | None) -> None:
    """Write the wheels and the patched llama.cpp to the folder; needs only Python and pip."""
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    other = [] if python_version is None else ["--python-version", python_version]
    for platform in PLATFORMS if other else ():
        other += ["--platform", platform]
    binary = ["--only-binary=:all:", *other]
    call(*pip, "download", "--quiet", "--dest", wheels, *binary, *PACKAGES)
    call(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, "--requirement", "requirements.txt")
    sources = folder / "llama.cpp"
    needed = (
        str(path) for name in ("platformdirs", "patch_ng") for path in wheels.glob(f"{name}-*")
    )
    prepare = [sys.executable, "native/prepare_llama_cpp.py", "--output", str(sources)]
    call(*prepare, PYTHONPATH=os.pathsep.join(needed))
    shutil.make_archive(str(sources), "xztar", sources)
    shutil.rmtree(sources)


def check_build(plan: Plan) -> Iterator[Check]:
    """Build for this GPU, or install a carried wheel; meanwhile prepare kernels and model."""
    if plan.is_mock:
        return
    started = time.monotonic()
    wheels = plan.folder / "wheels"
    arguments = cmake_arguments(plan.llama_cpp)
    plan.start(compile_kernels)
    if not plan.python.exists():
        call(sys.executable, "-m", "venv", "--without-pip", plan.folder / "venv")
    install: list[str | Path] = [sys.executable, "-m", "pip", "--python", plan.python, "install"]
    install += ["--quiet", "--no-index", "--find-links", wheels]
    plan.finished(*install, "gguf", "pytest", "pytest-xdist")
    plan.start(write_model)
    done = plan.finished(
        *(*install, next(wheels.glob("pyh2o_llm-*.whl"), ROOT)),
        CMAKE_ARGS=" ".join(arguments),
        CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count() or 1),
    )
    result = f"{time.monotonic() - started:.0f} s" if done.ok else done.last_line
    yield Check("build", result, "installed", done.ok)


def cmake_arguments(llama_cpp: Path) -> Iterator[str]:
    """Yield the arguments for CMake; the last ones, from the environment, override others."""
    yield from ("-DLLAMA_BUILD=OFF", "-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native")
    yield f"-DPYH2O_LLAMA_CPP={llama_cpp}"
    # a toolkit may lack cuBLAS, which NVIDIA's packages for Python have
    for name in ("cublas", "cublasLt"):
        if library := cuda_file(f"lib{name}.so*"):
            yield f"-DCUDA_{name}_LIBRARY={library}"
    if header := cuda_file("cublas_v2.h"):
        yield f"-DCMAKE_CUDA_FLAGS=-I{header.parent}"
    yield os.environ.get("CMAKE_ARGS", "")


def check_gpu(plan: Plan) -> Iterator[Check]:
    """Check that the package finds the GPU, and write a tiny model for later steps."""
    prepared = plan.finished(
        *(plan.python, "-c", PREPARE, plan.folder / "tiny.gguf", plan.device),
        PYTHONPATH=str(HELPERS),
    )
    if prepared.ok:
        plan.header = prepared.last_line
    elif plan.is_mock:
        sys.exit(
            f"error: {plan.python}: {prepared.last_line}: run this with a Python that has the "
            "checkout and its [test] packages, such as .venv/bin/python after `make build`"
        )
    yield Check("GPU and package", prepared.last_line, "there", prepared.ok)


# -------------------------------------------------------------------------------------------------
# Right answers
# -------------------------------------------------------------------------------------------------


def check_tests(plan: Plan) -> Iterator[Check]:
    """Run the tests of devices, and yield a line for each test that ran on the GPU."""
    report = plan.folder / "tests.xml"
    report.unlink(missing_ok=True)
    done = plan.finished(
        *(plan.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
        *("-n", "0" if plan.is_mock else str(min(8, os.cpu_count() or 1)), "-k", plan.tests),
        *(TESTS / name for name in DEVICE_TESTS),
        PYH2O_TEST_DEVICE=plan.device,
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


def check_text(plan: Plan) -> Iterator[Check]:
    """Compare logits along a greedy text of the CPU."""
    model = plan.model.resolve() if plan.model else plan.folder / "tiny.gguf"
    done = plan.finished(
        plan.python, CLIENT, plan.device, model, "text", "40" if plan.is_mock else "200"
    )
    yield Check(f"greedy text of {model.name}", done.last_line, "the CPU's, to rounding", done.ok)


# Both with recall.
SANITIZED: dict[str, tuple[str, ...]] = {"state": ("f16", "20"), "search": ("f16", "-1", "")}


def check_memory(plan: Plan) -> Iterator[Check]:
    """Run CUDA's checkers on compactions, re-bases, saved states and searches of a tiny model."""
    tools = ("memcheck",) if plan.is_mock else ("memcheck", "racecheck")
    with ThreadPoolExecutor() as pool:
        running = [
            (f"compute-sanitizer {tool}, {case}", pool.submit(sanitized, plan, tool, case))
            for case in SANITIZED
            for tool in tools
        ]
    for name, future in running:
        done = future.result()
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        result = summary[-1].strip("= ") if summary else done.last_line
        yield Check(name, result, "no error", done.ok)


def sanitized(plan: Plan, tool: str, case: str) -> Finished:
    return plan.finished(
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
        *("--report-api-errors", "no"),  # ggml tries to update graphs that cannot be
        *("--target-processes", "all", plan.python, CLIENT, plan.device),
        *(plan.folder / "tiny.gguf", case),
        *SANITIZED[case],
    )


# Twelve minutes in total.
STEPS = {
    "build": Step(check_build, 240),
    "gpu": Step(check_gpu, 10),  # always
    "tests": Step(check_tests, 100),
    "text": Step(check_text, 20),
    "memory": Step(check_memory, 80),
    "kernels": Step(check_kernels, 40),
    "speed": Step(check_speed, 170),
    "profile": Step(check_profile, 60),
}


if __name__ == "__main__":
    sys.exit(main())
