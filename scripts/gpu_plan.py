"""Shared by the steps of scripts/gpu_check.py: programs with time limits, and table lines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path

from steps import ROOT, run, say

TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"

BACKGROUND = 180  # seconds for a task alongside the steps


@dataclass(frozen=True)
class Check:
    """One line of the table; a remark replaces the verdict."""

    name: str
    result: str
    must: str = ""
    passed: bool = True
    remark: str = ""

    @property
    def line(self) -> str:
        mark = self.remark or ("" if self.passed else "**failed**")
        return f"| {self.name} | {self.result} | {self.must} | {mark} |"


@dataclass(frozen=True)
class Finished:
    ok: bool
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        first, second = (self.stdout, self.stderr) if self.ok else (self.stderr, self.stdout)
        return (first.strip() or second.strip() or "nothing was printed").splitlines()[-1]


@dataclass
class Plan:
    """Options of a run, and its results.

    Attributes:
        device: "gpu", or "coarse" for the emulated one.
        tests: filter for pytest -k.
        model: model to compare logits of; None for a tiny one.
        ends: end of the current step's time limit.
        header: name of the GPU.
        pages: sections after the table, and the output of failed programs.
        tasks: programs in the background, by name.
    """

    folder: Path
    device: str
    only: Sequence[str]
    tests: str
    model: Path | None
    shape: str
    ends: float = 0.0
    header: str = "no GPU found"
    checks: list[Check] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    tasks: dict[str, futures.Future[Finished]] = field(default_factory=dict)
    pool: futures.ThreadPoolExecutor = field(default_factory=lambda: futures.ThreadPoolExecutor(4))

    @property
    def is_mock(self) -> bool:
        return self.device != "gpu"

    @property
    def python(self) -> Path:
        """The folder's Python, or in a rehearsal possibly the current one."""
        own = self.folder / "venv" / "bin" / "python"
        return Path(sys.executable) if self.is_mock and not own.exists() else own

    @property
    def llama_cpp(self) -> Path:
        """The carried sources, unpacked."""
        sources, unfinished = self.folder / "llama.cpp", self.folder / "llama.cpp.part"
        if not sources.exists():
            shutil.unpack_archive(self.folder / "llama.cpp.tar.xz", unfinished)
            unfinished.replace(sources)
        return sources

    @property
    def seconds_left(self) -> float:
        """Time left for the current step, at least a second."""
        return max(1.0, self.ends - time.monotonic())

    def start(self, task: Callable[[Plan], Finished]) -> futures.Future[Finished]:
        """Start a background task with its own time limit, once."""
        name = task.__name__
        if name not in self.tasks:
            own = replace(self, ends=time.monotonic() + BACKGROUND)
            self.tasks[name] = self.pool.submit(task, own)
        return self.tasks[name]

    def result(self, task: Callable[[Plan], Finished]) -> Finished:
        try:
            return self.start(task).result(self.seconds_left)
        except futures.TimeoutError:
            return Finished(False, "", f"{task.__name__} is not done in time")

    def finished(self, *command: str | Path, **environment: str) -> Finished:
        """Run a program in a folder where `pyh2o` is the installed one, within the time limit."""
        seconds = self.seconds_left
        # spinning threads would slow down a rehearsal on a loaded machine
        waiting = {"OMP_WAIT_POLICY": "passive"} if self.is_mock else {}
        with subprocess.Popen(
            [str(part) for part in command],
            cwd=TESTS,
            env={**os.environ, **waiting, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                stdout, stderr = process.communicate()
                stderr += f"\nended after {seconds:.0f} s, its limit"
        if process.returncode:
            print(stdout[-20_000:], stderr[-3000:], sep="\n", file=sys.stderr)
            words = " ".join(str(part) for part in command)
            self.pages.append(f"{words[:200]}\n\n```text\n{stdout[-2000:]}{stderr[-6000:]}\n```")
        return Finished(process.returncode == 0, stdout, stderr)

    def write(self) -> str:
        """Write the report so far, and return its table."""
        lines = ["| check | result | must be | |", "|---|---|---|---|"]
        table = "\n".join([self.header, "", *lines, *(check.line for check in self.checks)])
        text = "\n\n".join([table, *self.pages])
        (self.folder / "report.md").write_text(text + "\n", encoding="utf-8")
        return table


def cuda_file(pattern: str) -> Path | None:
    """Find a file in CUDA's toolkit or in NVIDIA's Python packages."""
    compiler = shutil.which("nvcc")
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    roots += [Path(compiler).resolve().parents[1]] if compiler else []
    roots += [*sorted(Path("/usr/local").glob("cuda*"), reverse=True)]
    roots += [Path(sysconfig.get_path("purelib")) / "nvidia"]
    for root in roots:
        for file in sorted(root.rglob(pattern)):
            if "stubs" not in file.parts:
                return file
    return None


def call(*command: str | Path, **environment: str) -> None:
    words = [str(part) for part in command]
    say(" ".join(words)[:150])
    started = time.perf_counter()
    try:
        run(words, environment)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {words[0]} ended with {error.returncode}: see its output above")
    print(f"    {time.perf_counter() - started:.0f} s", flush=True)
