"""The figures of scripts/gpu_check.py: kernels alone, a model, and where its time goes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_plan import HELPERS, Check, Finished, Plan, cuda_file
from steps import ROOT

BENCHMARKS = ROOT / "research" / "benchmarks"
RESEARCH = {"PYTHONPATH": str(ROOT)}

# Computed for an RTX 4090 and Llama 3 8B in Q4_K_M, with the kernels before the rewrite and after.
PREDICTED = """Predicted for an RTX 4090 with Llama 3 8B in Q4_K_M, milliseconds:

| | text | full f16 | 20 %, no recall | recall, first kernels | recall, rewritten |
|---|---|---:|---:|---:|---:|
| writing a token | 8k | 7.9 | 7.2 | 11.4 (0.69x) | 7.8-8.1 (1.0x) |
| | 32k | 11.6 | 7.2-8.3 | 11.8 (0.99x) | 7.9-8.1 (1.45x) |
| reading 512 | 8k / 32k | 96 / 170 | 106 | 154 / 178 | 95-105 |"""


@dataclass(frozen=True)
class Prediction:
    """A figure, and the ranges that it was predicted in: for the first kernels, for rewritten."""

    name: str
    unit: str
    first: tuple[float, float]
    rewritten: tuple[float, float]

    def check(self, figure: float) -> Check:
        ranges = {"first kernels": self.first, "rewritten": self.rewritten}
        texts = [f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items()]
        met = [name for name, (low, high) in ranges.items() if low <= figure <= high]
        remark = f"as predicted: {met[0]}" if met else "prediction missed"
        result = f"{figure:.3g} {self.unit}"
        return Check(self.name, result, f"predicted: {', '.join(texts)}", remark=remark)


ATTEND_FOUND = Prediction("attend_found, a token, 205 rows, pinned", "us", (130, 170), (0, 40))
LOOK = Prediction("look, a page and block of 512 tokens", "us", (6, 10), (0, 3))


# -------------------------------------------------------------------------------------------------
# Kernels
# -------------------------------------------------------------------------------------------------

# Tiny sizes for the emulated GPU.
EMULATED = """
from pathlib import Path
from compiled import ROOT, compile_library, ggml_header
folders = [ROOT / "tests" / "native" / "cuda_on_cpu", ggml_header()]
sources = [ROOT / "research" / "benchmarks" / "cuda_kernels.cpp"]
compile_library("cuda_kernels", sources, folders).time_kernels(True)
"""


def compile_kernels(plan: Plan) -> Finished:
    """Compile the kernels with the flags of ggml's CUDA backend."""
    ggml = plan.llama_cpp / "ggml"
    cublas = cuda_file("cublas_v2.h")
    return plan.finished(
        *("nvcc", "-x", "cu", "-std=c++17", "-O3", "-arch=native", "-use_fast_math"),
        *("-extended-lambda", "--expt-relaxed-constexpr", f"-I{ROOT / 'native' / 'src'}"),
        *(f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", f"-I{cublas.parent if cublas else '.'}"),
        *(BENCHMARKS / "cuda_kernels.cpp", "-o", plan.folder / "cuda_kernels"),
    )


def check_kernels(plan: Plan) -> Iterator[Check]:
    """Times of single kernels, and what differences between them say."""
    if plan.is_mock:
        done = plan.finished(plan.python, "-c", EMULATED, PYTHONPATH=str(HELPERS))
    else:
        done = plan.result(compile_kernels)
        if done.ok:
            done = plan.finished(plan.folder / "cuda_kernels")
    figures: dict[str, float] = {}
    for line in done.stdout.splitlines():
        name, figure, unit = line.split("\t")
        figures[name] = float(figure)
        yield Check(name, f"{figure} {unit}")
    if not plan.is_mock:
        yield from predicted(figures)
    if not done.ok:
        error = re.search(r"^.*\berror\b.*$", done.stderr, re.MULTILINE)
        yield Check("kernels", error[0] if error else done.last_line, "measured", False)


def predicted(figures: Mapping[str, float]) -> Iterator[Check]:
    """What can be told of kernels that are launched together, where all that it takes is there."""

    def search(n_pages: int, n_tokens: int, n_rows: int, memory: str = "pinned") -> float:
        name = f"search {n_pages} pages, {n_tokens} tokens, {n_rows} rows, {memory}"
        return figures.get(name, float("nan"))

    found = search(64, 1, 205) - search(64, 1, 1)
    # two blocks share the pages
    look = 2 * (search(1024, 512, 820) - search(64, 512, 820)) / (1024 - 64)
    for prediction, figure in ((ATTEND_FOUND, found), (LOOK, look)):
        if figure == figure:  # a number
            yield prediction.check(figure)


# -------------------------------------------------------------------------------------------------
# A model
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One run of research.speed, with the minimum speeds relative to the full cache.

    Attributes:
        histories, budget, recall: arguments of research.speed.
        writes, reads: minimum speeds by the name of a cache and a history.
    """

    window: int
    histories: tuple[int, ...]
    budget: str
    recall: str
    writes: Mapping[tuple[str, int], float]
    reads: Mapping[tuple[str, int], float]


RECALL, EVICTING, ALL_ROWS = "20 %", "20 %, no recall", "100 %, no recall"
COMPARISONS = (
    Comparison(
        *(8192, (8192, 32768), "0.2", "0,default"),
        writes={(RECALL, 8192): 0.9, (RECALL, 32768): 1.3, (EVICTING, 8192): 1.0}
        | {(EVICTING, 32768): 1.5},
        reads={(RECALL, 8192): 0.8, (RECALL, 32768): 1.0},
    ),
    # the cost of scores with equal cells
    Comparison(32768, (32768,), "1.0", "0", writes={(ALL_ROWS, 32768): 0.9}, reads={}),
)
MOCK_PART = 256  # divisor of the number of tokens in a rehearsal


def model_file(plan: Plan) -> Path:
    return plan.folder / ("tiny.gguf" if plan.is_mock else f"{plan.shape}.gguf")


def write_model(plan: Plan) -> Finished:
    path = model_file(plan)
    if path.exists():
        return Finished(True, "", "")
    unfinished = path.with_suffix(".part")
    # with fewer positions, a budget of all rows would be reduced by the slack
    made = ("research.benchmarks.random_model", plan.shape, unfinished, "--context", "65536")
    done = plan.finished(plan.python, "-m", *made, **RESEARCH)
    if done.ok:
        unfinished.replace(path)
    return done


def check_speed(plan: Plan) -> Iterator[Check]:
    """Measure a model of random weights, interleaved with llama.cpp's full caches."""
    made = plan.result(write_model)
    if not made.ok:
        yield Check(f"model of {plan.shape}", made.last_line, "written", False)
        return
    plan.pages.append(PREDICTED)
    for comparison in COMPARISONS:
        yield from compared(plan, comparison)


def compared(plan: Plan, asked: Comparison) -> Iterator[Check]:
    """Yield the lines of one comparison, for the histories that were reached."""
    report = plan.folder / "speed.json"
    report.unlink(missing_ok=True)
    part = MOCK_PART if plan.is_mock else 1
    histories = {tokens // part: tokens for tokens in asked.histories}
    layers, n, rounds = ("0", "4", "1") if plan.is_mock else ("-1", "64", "3")
    done = plan.finished(
        *(plan.python, "-m", "research.speed", "--model", model_file(plan), "--only-flash"),
        *("--kv-type", "f16", "--gpu-layers", layers, "--ctx", str(asked.window // part)),
        *("--history", ",".join(map(str, histories)), "--budget", asked.budget),
        *("--recall", asked.recall, "--rounds", rounds, "-n", n, "--json", report),
        **RESEARCH,
    )
    plan.pages.append(done.stdout)
    for result in json.loads(report.read_text())["histories"] if report.exists() else ():
        for check in speed_checks(result, asked, histories[result["history"]]):
            # the speed of a tiny model is not checked
            is_judged = not plan.is_mock or check.must == "measured"
            yield check if is_judged else Check(check.name, check.result)
    if not done.ok:
        yield Check(f"speed of --budget {asked.budget}", done.last_line, "measured", False)


def speed_checks(result: dict[str, Any], asked: Comparison, history: int) -> Iterator[Check]:
    full = next((one["read_per_second"] for one in result["figures"] if one["is_full"]), None)
    measured = {one["cache"]: one for one in result["figures"] if full}
    for cache in {cache: None for cache, after in asked.writes if after == history} | measured:
        name = f"{cache}, after {history:,} tokens"
        if cache not in measured:
            yield Check(name, "see report.md", "measured", False)
            continue
        figures = measured[cache]
        read, wrote = figures["read_per_second"], figures["generated_per_second"]["median"]
        speeds = [
            ("reads", read, read / full, asked.reads),
            ("writes", wrote, figures["ratio"]["median"], asked.writes),
        ]
        for verb, speed, ratio, limits in speeds:
            text = f"{speed:.0f} tok/s, {ratio:.2f}x full"
            least = limits.get((cache, history))
            must = "" if least is None else f">= {least}x"
            yield Check(f"{name}: {verb}", text, must, least is None or ratio >= least)
        if cache == EVICTING:
            share, memory = figures["compaction_share"], figures["share_of_full"]
            text = f"{share:.1%} of time"
            yield Check(f"{name}: compactions", text, "<= 1%", share <= 0.01)
            # rows, a slack of 512 in whole blocks of cells, and scores
            most = 1.02 * (0.2 + 768 / asked.window)
            text = f"{memory:.1%} of full"
            yield Check(f"{name}: KV memory", text, f"<= {most:.1%}", memory <= most)


# -------------------------------------------------------------------------------------------------
# Where time goes
# -------------------------------------------------------------------------------------------------


def compile_trace(plan: Plan) -> Path:
    """Compile the profiler, which needs the toolkit's CUPTI."""
    header, cupti = cuda_file("cupti.h"), cuda_file("libcupti.so*")
    if header is None or cupti is None:
        raise FileNotFoundError("no CUPTI: set CUDA_HOME to a toolkit with cupti.h and libcupti.so")
    library = plan.folder / "libcuda_trace.so"
    cuda = cuda_file("cuda.h")
    done = plan.finished(
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-shared", "-fPIC"),
        *(f"-I{header.parent}", f"-I{(cuda or header).parent}", BENCHMARKS / "cuda_trace.cpp"),
        *(cupti, f"-Wl,-rpath,{cupti.parent}", "-o", library),
    )
    if not done.ok:
        raise RuntimeError(done.last_line)
    return library


def check_profile(plan: Plan) -> Iterator[Check]:
    """Profile a chunk, a compaction and single tokens, with recall and with the full cache."""
    made = plan.result(write_model)
    histories, arguments = "8192,32768", ["--ctx", "8192"]
    environment = dict(RESEARCH)
    if plan.is_mock:
        histories, arguments = "300", ["--ctx", "256", "--gpu-layers", "0"]
    else:
        trace = {"CUDA_INJECTION64_PATH": str(compile_trace(plan)), "GGML_CUDA_PDL": "0"}
        environment |= trace
    if not made.ok:
        yield Check(f"model of {plan.shape}", made.last_line, "written", False)
        return
    for cache in ([], ["--full"]):
        done = plan.finished(
            *(plan.python, "-m", "research.benchmarks.cuda_profile", model_file(plan)),
            *("--history", histories, *arguments, *cache),
            **environment,
        )
        plan.pages.append(f"```text\n{done.stdout}```")
        yield from profiled(done.stdout)
        if not done.ok:
            name = " ".join(["profile", *cache])
            yield Check(name, done.last_line, "measured", False)


def profiled(text: str) -> Iterator[Check]:
    """The sections of a profile, and in that of single tokens the kernel with a prediction."""
    for title, figure in re.findall(r"^### (.*): ([\d.]+ ms.*)$", text, re.MULTILINE):
        yield Check(f"profile, {title}", figure)
    section = text.partition("one by one")[2].partition("###")[0]
    if of_kernel := re.search(r"x +([\d.]+) us +attend_found", section):
        yield ATTEND_FOUND.check(float(of_kernel[1]))
