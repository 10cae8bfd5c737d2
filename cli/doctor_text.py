"""The report of `pyh2o doctor` as text that fits 80 columns, but for long paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyh2o.system.folders import Folder
from pyh2o.system.report import Configuration, Machine, Program, Report
from pyh2o.system.threads import Cores

from .terminal.entries import entry
from .terminal.terminal import harmless
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.system.products import Products

# Digits of a hash that are enough to recognise it.
DIGITS = 10


def report_text(report: Report) -> str:
    """Lines for a person, without the problems."""
    machine = report.machine
    entries = [
        ("pyh2o", _program(report.program)),
        ("python", [machine.python]),
        ("extras", [", ".join(report.program.extras) or "none"]),
        ("system", [", ".join(filter(None, [machine.system, machine.libc]))]),
        ("processor", [machine.cpu, _cores(machine.cores), *_busy(machine)]),
        ("instructions", [" ".join(machine.instructions) or "not known"]),
        ("attention", [_attention(machine)]),
        ("products", _products(report.products)),
        ("memory", [_memory(machine)]),
        ("gpus", _gpus(report)),
        *((folder.keeps, _folder(folder)) for folder in report.folders),
        ("configuration", _configuration(report.configuration)),
    ]
    return harmless("".join(line for label, said in entries for line in entry(label, said)))


def _program(program: Program) -> list[str]:
    build = program.build
    parts = [
        program.version,
        f"llama-cpp-python {program.llama_cpp_python or 'is not installed'}",
    ]
    if build:
        parts += [
            f"llama.cpp {build['llama_cpp_commit'][:DIGITS]}",
            f"ggml {build['ggml']}",
            f"patches {build['patches'][:DIGITS]}",
            f"backends {' '.join(build['backends'])}",
        ]
    if program.not_loaded is None:
        libraries = f"{program.library}, of which {program.cpu_library} computes on the processor"
    else:
        libraries = f"{program.library}, which cannot be loaded"
    return [", ".join(parts), libraries]


def _cores(cores: Cores) -> str:
    text = f"{count(cores.physical, 'core')}, {count(cores.logical, 'thread')}"
    if cores.allowed < cores.logical:
        text += f", of which this process may use {cores.allowed}"
    if cores.quota is not None:
        text += f", a container's limit of {cores.quota:g} CPUs"
    return f"{text}: {cores.used} used by default"


def _busy(machine: Machine) -> list[str]:
    if (n_busy := round(machine.busy or 0)) == 0:
        return []
    cpus = f"{n_busy} of {count(machine.cores.logical, 'CPU')}"
    return [f"other programs keep {cpus} busy: generation will be slower"]


def _products(found: Sequence[Products]) -> list[str]:
    lines = []
    for products in found:
        where = f"{products.gpus}: " if products.gpus else ""
        right = " ".join(products.right) or "none"
        types = count(len(products.right), "type")
        lines.append(f"{where}{types} of weights, as NumPy has them: {right}")
        if products.unknown:
            lines.append(f"{where}not tried: {' '.join(products.unknown)}")
    return lines or ["not known"]


def _attention(machine: Machine) -> str:
    if machine.attention is None:
        return "not known"
    name = "plain C++" if machine.attention == "portable" else machine.attention
    return f"{name}, for rows of f32, f16, q8_0 and q4_0 alike"


def _memory(machine: Machine) -> str:
    parts = [
        f"{size / 2**30:,.1f} GiB {what}"
        for size, what in (
            (machine.total_bytes, "in all"),
            (machine.available_bytes, "available"),
            (machine.limit_bytes, "is a container's limit"),
        )
        if size is not None
    ]
    return ", ".join(parts) or "not known"


def _gpus(report: Report) -> list[str]:
    machine = report.machine
    lines = [
        f"{gpu.name}, {gpu.free / 2**30:,.1f} of {gpu.total / 2**30:,.1f} GiB free"
        for gpu in machine.gpus
    ]
    if not lines:
        unknown = report.program.not_loaded is not None
        lines = ["not known" if unknown else "none that this build can use"]
    if machine.nvidia_driver is not None:
        lines.append(f"driver of NVIDIA {machine.nvidia_driver}")
    return lines


def _folder(folder: Folder) -> list[str]:
    state = (
        f"{count(folder.n_items, folder.keeps.removesuffix('s'))}, {folder.n_bytes / 1e6:,.1f} MB"
    )
    if not folder.is_there:
        state = "not there yet"
    if folder.free_bytes is not None:
        state += f", {folder.free_bytes / 2**30:,.1f} GiB free"
    return [folder.path, state, *([", ".join(folder.names)] if folder.names else [])]


def _configuration(configuration: Configuration) -> list[str]:
    state = "" if configuration.is_there else ", not there"
    variables = [f"{name} = {value}" for name, value in configuration.variables.items()]
    return [f"{configuration.path}{state}", *variables]
