"""What is wrong with an installation or a machine, as its report tells it."""

from __future__ import annotations

from collections.abc import Iterator

from ..library import GPU_BACKENDS
from .folders import Folder
from .processor import missing_sets
from .report import Program, Report
from .verdicts import CURE, passed_over_text

LEAST_FREE = 2 * 2**30
"""Bytes that a disk should have left: a small model, or some long conversations."""


def problems_of(report: Report) -> tuple[str, ...]:
    """A line for each problem, with its cause and its cure."""
    return (
        *_of_library(report),
        *_of_processor(report),
        *(line for products in report.products for line in products.problems()),
        *_of_gpus(report),
        *(line for folder in report.folders for line in _of_folder(folder)),
        *_of_configuration(report),
    )


def _of_library(report: Report) -> Iterator[str]:
    program = report.program
    if program.not_loaded is not None:
        yield program.not_loaded
    built_with = program.build.get("llama_cpp_python")
    if built_with and program.llama_cpp_python not in (None, built_with):
        yield (
            f"llama-cpp-python {program.llama_cpp_python} is installed, and pyh2o was built for "
            f"{built_with}: {_reinstall(program)}"
        )


def _reinstall(program: Program) -> str:
    version = program.build["llama_cpp_python"]
    return f"SKBUILD_WHEEL_CMAKE=false pip install --no-cache-dir llama-cpp-python=={version}"


def _of_processor(report: Report) -> Iterator[str]:
    machine = report.machine
    if missing := missing_sets(report.program.built_for, machine.instructions):
        yield (
            f"the library was built for a processor with {', '.join(missing)}, which this one "
            "lacks, so it may end the program: install pyh2o again, on this machine"
        )
    if machine.attention == "portable":
        yield (
            "attention runs in plain C++, because the processor shows neither AVX2, FMA and F16C "
            "nor NEON: if this is a virtual machine, let it see its host's processor"
        )
    for variant, types in report.program.passed_over.items():
        yield f"{passed_over_text(variant, types)}: {CURE}"


def _of_gpus(report: Report) -> Iterator[str]:
    machine, backends = report.machine, report.program.build.get("backends", ())
    is_for_gpus = any(name in backends for name in GPU_BACKENDS)
    # Without a driver a build for the CPU alone has nothing that it could use.
    if machine.no_gpu is not None and (is_for_gpus or machine.nvidia_driver is not None):
        yield machine.no_gpu


def _of_folder(folder: Folder) -> Iterator[str]:
    if not folder.writable:
        yield (
            f"the folder of the {folder.keeps}, {folder.path}, cannot be written to: make it "
            f"writable, or set {folder.variable} to another folder"
        )
    elif folder.free_bytes is not None and folder.free_bytes < LEAST_FREE:
        yield (
            f"the disk of the {folder.keeps}, {folder.path}, has {folder.free_bytes / 2**30:.1f} "
            f"GiB free: free some, or set {folder.variable} to a folder on another disk"
        )


def _of_configuration(report: Report) -> Iterator[str]:
    if report.configuration.wrong is not None:
        yield report.configuration.wrong
